"""Train a small GPT against the clock: recipe A of the NanoGPT speedrun in one file.
    ./run.sh                                                   set-up, data, training, result and a sample
    torchrun --standalone --nproc_per_node=8 train_gpt.py      8 GPUs, preset `record`
    python train_gpt.py --preset=pocket                        one process, on a CPU about two minutes; see --help
The mathematics is modded-nanogpt's ("the peer") after pull request #221 (record 71, 2026-02-15). RECIPE means
records/RECIPE.md, which has its formulas and sources; credits are in README.md.

Floor plan. A room uses only rooms above it, and nothing happens at import.
    1 Config      errors, layer table, stage table, n-gram tables, settings, presets, flags, Fabric
    2 Schedule    everything a step needs, in one `Values`: pure functions of the place in the plan
    3 Data        shards, packing, hashes of n-grams, row plans, the loader thread, validation batches
    4 Kernels     references in PyTorch and Triton kernels: norm, rotation, attention, MLP, head loss, rows; main_grad
    5 Model       parameter table and GPT
    6 Rows        tables whose rows lie on their owners: exchange between ranks, rows on a device or a host
    7 Optimizer   NorMuon, Adam, row updates, tie and untie, orders of communication
    8 Executor    forward_backward, optim_step, evaluate, snapshot and restore, memory, saves and checkpoints
    9 Race        clock, log, warm-up, time budget, the race itself, sample
   10 Main        ranks and device, attention kernel, header, `train` from data to result, profile, the one end
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
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")      # waiting threads that spin: 10 times slower beside busy cores
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C during the imports, until `main` begins

import argparse
import base64
import bisect
import contextlib
import ctypes
import difflib
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
import threading
import time
import traceback
import warnings
import zlib
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

# ====== Room 1: Config ================================================================================================
class TrainerError(Exception):
    """An error that says what was found, what was expected, and what to do about it."""
    status = 2                           # that the process exits with

    def __init__(self, what: str, found, expected, do: str):
        super().__init__(what, str(found)[:1000], str(expected), do)          # texts, which travel between ranks

    def __str__(self):
        what, found, expected, do = self.args
        return f"{what}\n  found:    {found}\n  expected: {expected}\n  do:       {do}"

class ConfigError(TrainerError):
    """A setting, a launch or a device that cannot work."""

class DataError(TrainerError):
    """Files that are missing, damaged or too few."""

class RunError(TrainerError):
    """Something that went wrong in a run: loss, memory, disk, another rank."""
    status = 1

def need(ok, what: str, found, expected, do: str, kind=ConfigError):
    """Raise an error of this kind unless ok."""
    if not ok:
        raise kind(what, found, expected, do)

def need_all(rules: dict, what: str, found, do: str):
    """Raise ConfigError with the first rule (its words -> whether it holds) that is broken."""
    for rule, holds in rules.items():
        need(holds, what, found, rule, do)

@dataclass(frozen=True)
class Layer:
    """One layer of the model. Moving a feature to another layer is moving a word."""
    attention: str               # "plain", "paired" (heads j and j + H/2 share one sequence of 2T positions) or "none"
    window: str = "short"        # attention span: "short" or "long"
    value: int | None = None     # value table added to the attention values
    key_shift: bool = False      # the unrotated half of the keys comes from the token before (key offset)
    keep_as: str = ""            # name under which the layer's output is kept
    add: str = ""                # kept stream added, gated, before the layer

SKIP = "skip"
LAYERS = (                                                                    # depth (RECIPE 2.2)
    Layer("none", keep_as=SKIP),                                              #  0
    Layer("plain", "long", value=0, key_shift=True, add=SKIP))                #  1
ATTENTION_LAYERS = tuple(depth for depth, layer in enumerate(LAYERS) if layer.attention != "none")
NUM_VALUE_TABLES = sum(layer.value is not None for layer in LAYERS)

class Stage(NamedTuple):
    """One stage of the run. Windows are in blocks; weights of the predicted tokens move linearly over the stage."""
    batch_tokens: int
    short_window: int
    long_window: int
    lr_mul: float
    mtp_start: tuple[float, ...]
    mtp_end: tuple[float, ...]
    untie: bool = False                  # at its start head and embedding become two parameters (`untie_step`)

STAGES = (                                                                    # RECIPE 4.1; the last is the extension
    Stage(131_072, 1, 3, 1.00, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
    Stage(262_144, 3, 7, 1.52, (1.0, 0.5), (1.0, 0.0)),
    Stage(393_216, 5, 11, 1.73, (1.0,), (1.0,), untie=True),
    Stage(393_216, 6, 13, 1.00, (1.0,), (1.0,)))

class NgramTable(NamedTuple):
    """One table of hashed n-grams."""
    label: str                           # of its parameter: part of initial values, signs and rounding bits
    order: int                           # n, a key of NGRAM_FACTORS; COPY: what followed the longest known n-gram
    rows: int                            # R; the last one means: no n-gram
    place: int | None = None             # depth of the layer whose attention values get the rows; None: the stream
    signs: int = 0                       # 1: multiply a row by a hashed vector of +-1, which differs where rows collide
    home: str = "device"                 # where owners keep the rows: "device" or "host"
    cadence: int = 2                     # steps between updates
    rounding: str = "nearest"            # of bf16 rows after an update: "nearest" or "stochastic"
    lr_mul: float = 37.5                 # of adam_lr
    wd_mul: float = 5.0                  # of adam_weight_decay
    beta2: float = 0.95                  # decay of the second moment in an update

# By order: odd factors of the tokens' hash and of the signs' hash, newest token first. Those for two and three tokens
# are the peer's of record 92, those of a fourth are ours; recipe A's own table of bigrams is none of these.
COPY, COPY_NGRAMS = 0, (1, 2, 3, 4, 6)   # order of a table of tokens to copy, and the n-grams by which it finds them
EVIDENCE = 3                             # one earlier occurrence of an n-gram; two with one next token; with two
COPY_FACTOR = 0x9E3779B97F4A7C15         # of 64-bit hashes, odd
CLASSES = 512                            # of the softmax in training
# Of them, those in every step: printable bytes, the line break, the most frequent pieces (ids are in this order), and
# the start of a document.
ALWAYS = (10, *range(32, 127), *range(256, 406), 2047)
SHARED_RATE = 0.5                        # learning rate of a row that spellings share, over that of a token's own row
IMPOSSIBLE = -1e4                        # logit of a token that the tokenizer cannot produce next
NGRAM_FACTORS = {
    COPY: ((), ()),
    2: ((36313, 27191), (48271, 30011)),
    3: ((17351, 60961, 45259), (58699, 39779, 26801)),
    4: ((50411, 22787, 64951, 38327), (43399, 56783, 20297, 61403))}
RECIPE_TABLES = ("bigram_embed", "value_embed", "embed")
RECORD_STEPS, RECORD_RAMP_UP, RECORD_RAMP_DOWN = 1547, 300, 50                # RECIPE 4.2
GPT2_VOCAB, GPT2_DOCUMENT_START = 50_257, 50_256
GATE_INPUTS = 12                         # features that a gate reads
FP8_UNIT = 16                            # sizes in an fp8 product are multiples of it
SLOT_UNIT = FP8_UNIT                     # tokens: a slot is a multiple of it, on every device

def knob(group: str, default, unit: str, about: str, choices: tuple = (), least: float = 0,
         most: float = 2**31 - 1):
    return field(default=default, metadata=dict(
        group=group, unit=unit, about=about, choices=choices, least=least, most=most))

_often = functools.partial(knob, "often set")
_data = functools.partial(knob, "data")
_model = functools.partial(knob, "model")
_schedule = functools.partial(knob, "schedule")
_optim = functools.partial(knob, "optimizer")
_run = functools.partial(knob, "run")

STAGE_ROW = "rows 'batch_tokens short long lr_mul mtp_start mtp_end [untie]' joined by ';'"
TABLE_ROW = ("n-grams: rows 'label order rows place signs home cadence rounding lr wd beta2' joined by ';', the last 8 "
             "columns of which may be left out; place: `stream`, or the depth of a layer")
ATTENTION_KERNELS = ("auto", "FA4", "FA3", "varlen", "reference")             # packages, torch's own, plain PyTorch

@dataclass(frozen=True)
class Config:
    """Everything a run may vary. One field is one flag; a preset gives fields other values and does nothing else."""
    # --help begins with these. Of them preset and seed alone decide about the numbers of a run.
    preset: str = _often("record", "name", "of values: record, record_tables, pocket, pocket_tables, race or tiny")
    train_files: str = _often("data/fineweb10B/fineweb_train_*.bin", "pattern", "training shards, taken in name order")
    val_files: str = _often("data/fineweb10B/fineweb_val_*.bin", "pattern", "validation shards")
    epochs: int = _often(1, "passes", "over the training shards; 0: cycle without end")
    seed: int = _often(0, "integer", "initial values; each parameter draws from (seed, label)")
    runs: int = _often(1, "runs", "in one process after one warm-up, with seeds seed, seed + 1, ...", (), 1, 10**4)
    max_steps: int = _often(0, "steps", "stop early, then validate; 0: the whole schedule")
    save: str = _often("", "folder", "for the final weights, their config and the bytes of the tokens; empty: none")
    sample: str = _often("", "folder", "generate from the weights that --save left there instead of training")
    resume: str = _often("", "folder", "run directory to continue from its last checkpoint, with its flags")
    # How documents are dealt to slots; a slot is the unit of packing, so num_slots decides losses.
    val_tokens: int = _data(10_485_760, "tokens", "validation tokens, a multiple of val_batch_tokens", least=1)
    val_batch_tokens: int = _data(2_097_152, "tokens", "one block of num_slots validation slots", least=1)
    max_doc_len: int = _data(2048, "tokens", "a document gives at most its first max_doc_len tokens", least=2)
    num_slots: int = _data(8, "slots", "equal shares of a step, divided by the ranks; sets the packing", least=1)
    vocab_size: int = _data(0, "tokens", "0: from the shard header")
    padded_vocab: int = _data(0, "tokens", "columns of the head; 0: the next multiple of 128")
    document_start: int = _data(-1, "id", "first token of every document; -1: from the header", least=-1)
    bigram_rows: int = _data(0, "rows", "hash table of token pairs; 0: 5 x padded_vocab; the last row: no pair")
    # Number and features of the layers are no flags: they are recipe A's, in LAYERS.
    model_dim: int = _model(768, "features", "width D = num_heads x head_dim", (), GATE_INPUTS, 2**16)
    num_heads: int = _model(6, "heads", "an even number: paired layers join heads j and j + H/2", (), 2, 2**12)
    head_dim: int = _model(128, "features", "a multiple of 4; half of it rotates", (), 8, 2**14)
    attn_scale: float = _model(0.1, "number", "softmax scale before YaRN; queries and keys are normalised")
    tables: tuple = _model((), "table", TABLE_ROW)
    dtype: str = _model("bfloat16", "type", "weights and activations", ("bfloat16", "float32", "float64"))
    head: str = _model("auto", "precision", "of training logits; auto: best", ("auto", "fp8", "emulated", "plain"))
    # The last row of `stages` is the extension, after the scheduled steps.
    num_scheduled_steps: int = _schedule(1507, "steps", "split evenly over all stages but the last", least=1)
    num_extension_steps: int = _schedule(40, "steps", "last stage, at the lowest learning rate")
    stages: tuple = _schedule(STAGES, "table", STAGE_ROW)
    window_block: int = _schedule(128, "tokens", "unit of the windows in the stage table", least=1)
    final_long_window: int = _schedule(20, "blocks", "long window of the final validation", least=1)
    cooldown_frac: float = _schedule(0.55, "share", "of the scheduled steps, at their end, with a falling rate", most=1)
    lr_floor: float = _schedule(0.1, "number", "learning rate factor at the end of the cooldown")
    time_budget: float = _schedule(0.0, "s", "of training, for the whole schedule; 0: steps as set")
    # Rates before the factor of the stage and the parameter's own multiplier.
    normuon_lr: float = _optim(0.023, "number", "attention and MLP banks")
    normuon_beta2: float = _optim(0.95, "number", "decay of the second moment per row", most=1)
    normuon_weight_decay: float = _optim(1.2, "number", "cautious, times lr^2")
    momentum_min: float = _optim(0.85, "number", "NorMuon momentum at both ends", most=1)
    momentum_max: float = _optim(0.95, "number", "NorMuon momentum in between", most=1)
    momentum_warmup_steps: int = _optim(-1, "steps", "-1: 300 at 1,547 steps, in proportion else", least=-1)
    momentum_cooldown_steps: int = _optim(-1, "steps", "-1: 50 at 1,547 steps, in proportion else", least=-1)
    adam_every: int = _optim(2, "steps", "between updates of Adam, for which gradients add up", (1, 2))
    adam_lr: float = _optim(0.008, "number", "everything else; multipliers stand in the parameter table")
    adam_weight_decay: float = _optim(0.005, "number", "cautious, times (lr x multiplier)^2")
    adam_eps: float = _optim(1e-10, "number", "added to the uncorrected root of the second moment")
    # None of these decides about the numbers of a run: a resumed run may change them.
    device: str = _run("auto", "device", "auto: cuda if there is one", ("auto", "cpu", "cuda"))
    compile: int = _run(-1, "0|1", "torch.compile; -1: on CUDA only", (-1, 0, 1))
    attention: str = _run("auto", "kernel", "auto: the first that is right", ATTENTION_KERNELS)
    row_comms: str = _run("sparse", "mode", "table rows that travel: all, or those asked for", ("dense", "sparse"))
    debug_rows: int = _run(0, "0|1", "poison rows not fetched, look for gradients of rows not planned", (0, 1))
    slots_per_micro_batch: int = _run(0, "slots", "side by side in the model; 0: all that the device's memory fits")
    val_every: int = _run(250, "steps", "between validations; 0: only the final one")
    target_loss: float = _run(3.28, "nats", "against which several runs are tested; 0: none")
    run_dir: str = _run("", "folder", "of the logs; empty: logs/<run id>")
    checkpoint_every: int = _run(0, "steps", "between checkpoints, at even steps; the last two are kept; 0: none")
    profile: str = _run("", "a:b", "trace steps a to b - 1 on every rank; the time of such a run does not count")
    comm_timeout: float = _run(60.0, "s", "longest wait for another rank or for the loader thread", least=1)
    sample_tokens: int = _run(96, "tokens", "generated after the run, or by --sample; 0: none")
    temperature: float = _run(0.8, "number", "of a sample: the lower, the likelier its tokens", least=0.01)
    prompt: str = _run("", "text", "with which a sample begins")

# A row of a table is one text in a flag, in a log and in the settings of a save; so it is written and read here alone.
def numbers(word):
    return tuple(map(float, word.split(",")))

def place_of(word):
    return None if word == "stream" else int(word)

ROW_COLUMNS = dict(
    stages=(Stage, int, int, int, float, numbers, numbers, {"untie": True}.__getitem__),
    tables=(NgramTable, str, int, int, place_of, int, str, int, str, float, float, float))

def read_rows(name: str, text: str):
    """Return the rows of a table; columns left out have their defaults. Raises ValueError, TypeError or KeyError."""
    # strict: a word too many is an error, a word too few one of the constructor.
    make, *columns = ROW_COLUMNS[name]
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
    stages=tuple(stage._replace(batch_tokens=stage.batch_tokens // 256) for stage in STAGES),
    window_block=8, num_scheduled_steps=520, num_extension_steps=20, val_every=180, target_loss=0.0)
TINY = POCKET | dict(
    train_files="formula:512:511:40000:2", val_files="formula:512:511:4000:1",
    val_tokens=1024, val_batch_tokens=512, max_doc_len=24, model_dim=32, num_heads=2,
    stages=read_rows("stages",           # its own: a fork that changes STAGES keeps this preset
                     "128 1 3 1 1,.5,.25 1,.5,0; 256 3 7 1.52 1,.5 1,0; 384 5 11 1.73 1 1 untie; 384 6 13 1 1 1"),
    window_block=4, num_scheduled_steps=9, num_extension_steps=3, val_every=5, sample_tokens=8)
PRESETS = dict(
    record=RECORD,
    record_tables=RECORD | dict(tables=read_rows("tables", "more_bigram_embed 2 21000000 stream 1 device 2 nearest 70; "
                                                 "trigram_embed 3 21000000 stream 1 device 2 nearest 70")),
    pocket=POCKET,
    pocket_tables=POCKET | dict(tables=read_rows("tables", "trigram_embed 3 100000; fourgram_embed 4 100000")),
    race=POCKET | dict(
        stages=read_rows("stages", "2048 8 16 2.2 1 1; 2048 8 16 2.2 1 1"),
        num_scheduled_steps=78, num_extension_steps=14, model_dim=64, adam_every=1, compile=1, lr_floor=0.35,
        num_slots=4, val_batch_tokens=4096, bigram_rows=2, num_heads=2, head_dim=32, attn_scale=12.8 / 32,
        tables=read_rows("tables", "pair_embed 2 20480; trigram_embed 3 20480; fourgram_embed 4 20480; "
                                    "copy_embed 0 10241")),
    tiny=TINY)

# What may differ from the settings of a saved model or earlier run.
NOT_MATHEMATICS = {
    spec.name for spec in fields(Config) if spec.metadata["group"] in ("often set", "run")} - {"preset"}
NOT_INHERITED = {"run_dir", "runs", "resume", "save", "profile"}                      # by --resume: facts of one run
MAY_CHANGE = NOT_MATHEMATICS - {"seed"}                                               # on --resume
SETTINGS = "settings.json"               # of a run directory and of a save: {field: text of its flag}

def row_text(row: Stage | NgramTable):
    """Return the text of a row as `read_rows` reads it."""
    words = []
    for value in row:
        if isinstance(value, tuple):
            words.append(",".join(map(str, value)))
        elif isinstance(value, bool):
            words += ["untie"] * value
        else:
            words.append("stream" if value is None else str(value))
    return " ".join(words)

def flag_text(value):
    return ";".join(map(row_text, value)) if isinstance(value, tuple) else str(value)

def parse_value(name: str, text: str):
    """Read a field's value from the text of its flag. Raises ConfigError for another type, choice or bound."""
    spec = Config.__dataclass_fields__[name]
    about = spec.metadata
    kind = type(spec.default)
    choices = about["choices"]
    allowed = f"{kind.__name__}, {about['unit']}"
    if choices:
        allowed = f"one of {list(choices)}"
    elif kind in (int, float):
        allowed += f", {about['least']:,} to {about['most']:,}"

    # What a column or a type cannot read ends in the message below; no shell expands the ~ of --save=~/x.
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if kind is tuple:
            return read_rows(name, text)
        if about["unit"] in ("folder", "pattern"):
            text = os.path.expanduser(text)
        value = kind(text)
        in_bounds = kind is str or about["least"] <= value <= about["most"]   # a NaN never is
        if value in choices or (in_bounds and not choices):
            return value
    raise ConfigError(f"--{name}", repr(text), f"{allowed}: {about['about']}",
                      f"for example --{name}={flag_text(spec.default)}")

def make_config(values: dict):
    """Return the settings that these fields and their preset give, checked. Raises ConfigError."""
    preset = values.get("preset", Config.preset)
    need(preset in PRESETS, "--preset", preset, f"one of {list(PRESETS)}", "for example --preset=pocket")
    cfg = Config(**PRESETS[preset] | values)
    check_config(cfg)
    return cfg

def read_settings(folder: Path):
    """Return the settings that a run directory or a save has kept. Raises DataError."""
    path = folder / SETTINGS
    try:
        need(path.is_file() or not path.exists(), str(path), "no regular file", "settings of a run or of a save",
             "name the folder of one", DataError)
        settings = json.loads(path.read_bytes())      # another trainer may have had other flags
        return make_config({name: parse_value(name, text) for name, text in settings.items()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(str(path), f"{type(error).__name__}: {error}", "flags of this trainer", "name the "
                        "folder of a run or of a save; one of an older trainer needs that trainer, the train_gpt.py in "
                        "the run directory") from None

def print_result(text: str):
    """Print what the user asked for. Raises RunError if standard output does not take it."""
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:
        raise RunError("standard output", error, "one that takes all lines", "redirect it to where there is room; what "
                       "a run has found stands in its log") from None

def flag_parser(preset: str):
    """Return a parser of all flags, whose help shows the preset's values."""
    parser = argparse.ArgumentParser(
        "train_gpt.py", "%(prog)s [--preset=NAME] [--field=value ...], or --sample=DIR [PROMPT]", add_help=False,
        allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS, epilog="exit status: 0 done, 1 "
        "the run failed, 2 a bad setting or bad data, 129 hung up, 130 interrupted, 143 ended")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("prompt", nargs="?", help="the same as --prompt")
    values = vars(make_config(dict(preset=preset)))
    for group, specs in itertools.groupby(fields(Config), lambda spec: spec.metadata["group"]):
        listed = parser.add_argument_group(group)
        for spec in specs:
            about = f"{spec.metadata['about']} [{flag_text(values[spec.name])}]"
            listed.add_argument(f"--{spec.name}", metavar=spec.metadata["unit"], help=about,
                                type=functools.partial(parse_value, spec.name))
    return parser

def read_flags(argv):
    """Return {field: value} of the given flags. --help prints and exits. Raises ConfigError."""
    try:
        flags, unknown = flag_parser(Config.preset).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError("flags", error, "--field=value", "see --help") from None
    if unknown:
        known = [f"--{name}" for name in Config.__dataclass_fields__]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, 3, 0.4)
        raise ConfigError("unknown flag", repr(unknown[0]), "--field=value with a field that exists, or one prompt in "
                          "quotes", f"nearest: {', '.join(close)}" if close else "see --help")
    given = vars(flags)
    if "help" in given:
        print_result(flag_parser(given.get("preset", Config.preset)).format_help())
        sys.exit(0)

    # An empty folder is --resume=$FOLDER without a FOLDER: training anew would be a bad surprise.
    for name in ("resume", "sample"):
        need(given.get(name) != "", f"--{name}", "an empty name", "a folder", f"--{name}=FOLDER, or leave it out")
    need("sample" in given or not given.get("prompt"), "a word without a flag", given.get("prompt"), "--field=value",
         "a prompt needs --sample=DIR")
    return given

def decisive_settings(cfg: Config):
    """Return the settings on which a run's numbers depend, as texts."""
    # Homes of tables change no bit, and a run may be resumed with another.
    cfg = replace(cfg, tables=tuple(table._replace(home="device") for table in cfg.tables))
    return {name: flag_text(value) for name, value in vars(cfg).items() if name not in MAY_CHANGE}

def parse_flags(argv):
    """Return the settings; --resume puts an earlier run's flags first. Raises ConfigError, DataError.
    With --sample=DIR they are the flags given alone: `read_settings(DIR)` says what was trained."""
    given = read_flags(argv)
    if "sample" in given:
        may_vary = NOT_MATHEMATICS - {"resume"}
        need(given.keys() <= may_vary, "--sample", " ".join(argv), f"beside it only {sorted(may_vary)}",
             "leave the others out: the folder says what was trained")
        return Config(**given)
    if "resume" not in given:
        return make_config(given)

    # A flag may repeat what decides about the numbers of a run, and change the rest.
    earlier = read_settings(Path(given["resume"]))
    inherited = {name: value for name, value in vars(earlier).items() if name not in NOT_INHERITED}
    cfg = make_config(inherited | given)
    before = decisive_settings(earlier)
    for name, text in decisive_settings(cfg).items():
        need(text == before[name], f"--{name} with --resume", repr(text), f"{before[name]}, as in that run",
             f"leave --{name} out; these may change: {sorted(MAY_CHANGE - NOT_INHERITED)}, and the home of a table")
    return cfg

def check_layers(layers):
    """Raise ConfigError for a layer table that cannot work, or that would train another model than it seems to say."""
    kept = [""]                          # by the layers above; nothing can always be added
    for depth, layer in enumerate(layers):
        useful = layer.value is None or layer.attention != "none"
        need_all({
            "attention `plain`, `paired` or `none`, window `short` or `long`":
                layer.attention in ("plain", "paired", "none") and layer.window in ("short", "long"),
            "key_shift in a plain layer, a value table in one with attention":
                useful and (not layer.key_shift or layer.attention == "plain"),
            f"to add a stream that a layer above keeps, {kept}": layer.add in kept,
        }, f"LAYERS, layer {depth}", layer, "see the columns of Layer")
        kept += [layer.keep_as] * bool(layer.keep_as)

    values = sorted(layer.value for layer in layers if layer.value is not None)
    need(len(kept) == len(set(kept)) and values == list(range(len(values))), "LAYERS",
         f"streams kept {kept}, value tables {values}", "each stream once, and value tables 0, 1, ... once each",
         "see the columns of Layer")

def check_rows(cfg: Config):
    """Raise ConfigError for a row of --stages or --tables that cannot work."""
    # Batches are whole slots, and a slot whole units.
    unit = SLOT_UNIT * cfg.num_slots
    for stage in cfg.stages:
        need_all({
            f"a batch of a multiple of {unit} tokens ({SLOT_UNIT} x num_slots)":
                stage.batch_tokens > 0 and stage.batch_tokens % unit == 0,
            "1 <= short < long window": 1 <= stage.short_window < stage.long_window,
            "as many token weights at the end as at the start": len(stage.mtp_start) == len(stage.mtp_end),
            "a rate and token weights from 0 to 1,000":
                all(0 <= x <= 1000 for x in (stage.lr_mul, *stage.mtp_start, *stage.mtp_end)),
        }, "--stages", stage, f"change that row; the table is {STAGE_ROW}")

    # A label names a parameter, an attribute of the model and files of a checkpoint.
    labels = [*RECIPE_TABLES, *(table.label for table in cfg.tables)]
    for table in cfg.tables:
        columns = (table.signs, table.home, table.rounding)
        need_all({
            "a label of letters, digits and _ that ends with _embed": re.fullmatch(r"\w+_embed", table.label, re.ASCII),
            f"a label that neither the recipe has, {RECIPE_TABLES}, nor another row": labels.count(table.label) == 1,
            f"an order of {list(NGRAM_FACTORS)}": table.order in NGRAM_FACTORS,
            "2 rows or more, below 2^31: the last one means that there is no n-gram": 2 <= table.rows < 2**31,
            f"place `stream` or a layer with attention, {ATTENTION_LAYERS}": table.place in (None, *ATTENTION_LAYERS),
            "signs 0 or 1, home `device` or `host`, rounding `nearest` or `stochastic`":
                columns in itertools.product((0, 1), ("device", "host"), ("nearest", "stochastic")),
            f"a cadence of 1, 2 or 4 steps, a multiple of adam_every={cfg.adam_every}":
                table.cadence in (1, 2, 4) and table.cadence % cfg.adam_every == 0,
            "lr and wd from 0 to 10^6, beta2 from 0 to 1":
                0 <= table.lr_mul <= 10**6 and 0 <= table.wd_mul <= 10**6 and 0 <= table.beta2 <= 1,
        }, "--tables", table, f"change that row; the table is {TABLE_ROW}")

def check_config(cfg: Config):
    """Raise ConfigError for settings that do not fit together, and name ones that do."""
    # Types and bounds were checked where texts were read; these are about several settings, or about more than bounds.
    check_layers(LAYERS)
    check_rows(cfg)
    H, E = cfg.num_heads, cfg.head_dim
    unit = SLOT_UNIT * cfg.num_slots
    traced = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", cfg.profile or "1:2")
    rules = (                            # a field, whether it is right, what is expected, a value that is
        ("num_heads", H % 2 == 0, "an even number, since paired layers join two heads", H + 1),
        ("head_dim", E % 4 == 0, "a multiple of 4", E // 4 * 4),
        ("model_dim", cfg.model_dim == H * E, f"num_heads x head_dim = {H} x {E}", H * E),
        ("stages", len(cfg.stages) >= 2 and sum(stage.untie for stage in cfg.stages) <= 1,
         "two rows or more, the last for the extension, and `untie` in one row at most", flag_text(STAGES)),
        ("val_batch_tokens", cfg.val_batch_tokens % unit == 0, f"a multiple of {unit} ({SLOT_UNIT} x num_slots)",
         -(-cfg.val_batch_tokens // unit) * unit),
        ("val_tokens", cfg.val_tokens % cfg.val_batch_tokens == 0, "a multiple of val_batch_tokens",
         -(-cfg.val_tokens // cfg.val_batch_tokens) * cfg.val_batch_tokens),
        ("runs", cfg.runs == 1 or not (cfg.resume or cfg.save or cfg.profile),
         "one run for --resume, --save or --profile", 1),
        ("profile", traced and 0 < int(traced[1]) < int(traced[2]), "a:b for steps a to b - 1, 0 < a < b", "100:104"))
    for name, right, expected, instead in rules:
        value = flag_text(getattr(cfg, name))
        need(right, f"--{name}", value or "nothing", expected, f"for example --{name}={instead}")

@dataclass(frozen=True)
class Fabric:
    """The one object that knows ranks and devices. Passed on, never global."""
    device: torch.device
    rank: int = 0
    world: int = 1
    plan_group: Any = None               # of row plans, on the CPU: the loader thread's own, so that no order can clash

    @property
    def on_cuda(self):
        return self.device.type == "cuda"

    def synchronize(self):
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def set_timeout(self, seconds: float):
        if self.world > 1:
            for group in (None, self.plan_group):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def host_tensor(self, x):
        """Return an array or tensor as a tensor, pinned beside a GPU: torch uses a block again after its last copy."""
        tensor = torch.as_tensor(x)
        return tensor.pin_memory() if self.on_cuda else tensor

    def enter_thread(self):
        # The current device is a thread's own: without this, pinning memory would open GPU 0 from every rank.
        if self.on_cuda:
            torch.cuda.set_device(self.device)

    def say(self, text: str):
        """Print on rank 0. A console that is gone or full does not end the run."""
        if self.rank == 0:
            with contextlib.suppress(OSError, ValueError):
                print(text, flush=True)

    def gather(self, fact):
        """Return this fact of every rank, rank by rank. Collective."""
        everyone = [fact] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, fact)
        return everyone

    def check_agreement(self, facts: dict):
        """Raise ConfigError on every rank if any rank was started with other facts."""
        # All compare with rank 0, so that all find the same and none waits for another.
        everyone = self.gather(facts)
        for rank, theirs in enumerate(everyone):
            for name, expected in everyone[0].items():
                need(theirs.get(name) == expected, f"ranks disagree about {name}",
                     f"{expected} on rank 0, {theirs.get(name)} on rank {rank}", "one value",
                     "start every rank with the same flags, data and source")

    @contextlib.contextmanager
    def failing_together(self):
        """If the body raises a TrainerError on any rank, raise it on every rank, once all bodies have ended.
        Collective; the body must not wait for another rank."""
        failure = None
        try:
            yield
        except TrainerError as error:
            failure = error
        for rank, error in enumerate(self.gather(failure)):
            if error is not None:
                what, *rest = error.args
                raise type(error)(f"{what}, on rank {rank}" if self.world > 1 else what, *rest)

    def total_memory(self):
        """Return the bytes of the GPU, or without one of the host."""
        # Not what is free just now: the estimate, and so the micro-batches, have to be the same each time.
        if self.on_cuda:
            return torch.cuda.mem_get_info(self.device)[1]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
    short_window: int                    # tokens; a query sees that many keys before its own, and its own
    long_window: int
    mtp_weights: tuple[float, ...]       # of the 1st, 2nd, ... next token, not normalised
    rotary: Rotary
    normuon_lr: float
    adam_lr: float
    momentum: float
    adam_step: bool                      # last step of an Adam cycle, whose gradients its update consumes
    tied: bool                           # this step's forward reads the head, transposed, for its embedding
    untie: bool                          # after this step's update, head and embedding become two parameters
    validate: bool                       # validation comes before the training part of this step

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
    def __init__(self, cfg: Config, places: tuple = ()):
        # places: of the first step of each run cycle so far, ascending, with --time_budget; the race appends to it.
        self.cfg = cfg
        # A run's cycle, in steps, is the largest cadence: plans and checkpoints come at its multiples.
        self.cycle = max([cfg.adam_every, *(table.cadence for table in cfg.tables)])
        self.places = list(places)
        self.total_steps = cfg.num_scheduled_steps + cfg.num_extension_steps  # of the plan
        # All stages but the last share the scheduled steps evenly.
        scheduled = len(cfg.stages) - 1
        ends = [round(cfg.num_scheduled_steps * (k + 1) / scheduled) for k in range(scheduled)]
        self.starts = (0, *ends)                                              # of the stages, places in the plan
        self.ends = (*ends, self.total_steps)
        self.untie_start = next((start for start, stage in zip(self.starts, cfg.stages) if stage.untie), math.inf)
        self.cooldown_start = int(cfg.num_scheduled_steps * (1 - cfg.cooldown_frac))
        self.rotary = rotary_by_stage(cfg)

    def place(self, step: int):
        """Return how far a step is in the plan, in planned steps."""
        if self.cfg.time_budget:
            return min(self.places[step // self.cycle], self.total_steps)
        return step

    def first_step_at(self, place: float):
        """Return the first step at this place of the plan or after it; infinite while no clock has said so."""
        if not self.cfg.time_budget:
            return place
        cycles = bisect.bisect_left(self.places, place)
        return cycles * self.cycle if cycles < len(self.places) else math.inf

    @property
    def end_step(self):
        """Return the first step that is not trained; infinite while no clock has said which."""
        return min(self.cfg.max_steps or math.inf, self.first_step_at(self.total_steps))

    @property
    def untie_step(self):
        """Return the last step of the Adam cycle in which the run reaches the stage that unties."""
        # An embedding that leaves the head in the middle of a cycle would lose the cycle's gradients.
        step = self.first_step_at(self.untie_start)
        if step == math.inf:
            return step
        every = self.cfg.adam_every
        return step // every * every + every - 1

    def stage_at(self, place: float):
        return min(bisect.bisect_right(self.ends, place), len(self.ends) - 1)

    def lr_factor_at(self, place: float):
        """Return the stage's multiplier, which from the cooldown's start on goes linearly to the floor. No warm-up."""
        cooldown_steps = max(1, self.cfg.num_scheduled_steps - self.cooldown_start)
        done = min(max(0.0, (place - self.cooldown_start) / cooldown_steps), 1.0)
        return self.cfg.stages[self.stage_at(place)].lr_mul * (1 - done) + self.cfg.lr_floor * done

    def momentum_at(self, place: float):
        """Return NorMuon's momentum at a place of the plan: it rises at the start and falls at the end."""
        # A ramp that is not set (-1) has as large a share of the steps as in the record.
        cfg = self.cfg
        up = cfg.momentum_warmup_steps
        if up < 0:
            up = round(RECORD_RAMP_UP * self.total_steps / RECORD_STEPS)
        down = cfg.momentum_cooldown_steps
        if down < 0:
            down = round(RECORD_RAMP_DOWN * self.total_steps / RECORD_STEPS)
        rise = cfg.momentum_max - cfg.momentum_min
        if place < up:
            return cfg.momentum_min + rise * place / up
        steps_down = place - self.total_steps + down
        if steps_down > 0:
            return cfg.momentum_max - rise * steps_down / down
        return cfg.momentum_max

    def at(self, step: int) -> Values:
        """Return everything that a step needs; end_step's are those of the final validation."""
        # Stage and rates go by the place, which the clock may decide; Adam and validation by the step.
        cfg = self.cfg
        place = self.place(step)
        k = self.stage_at(place)
        stage = cfg.stages[k]
        long_window = stage.long_window
        if place >= self.total_steps:
            long_window = cfg.final_long_window                               # grown without YaRN
        factor = self.lr_factor_at(place)

        # Weights of the next tokens are linear in the position inside the stage.
        position = (place - self.starts[k]) / max(1, self.ends[k] - self.starts[k])
        mtp_weights = [first + (last - first) * position for first, last in zip(stage.mtp_start, stage.mtp_end)]
        return Values(
            step=step, stage=k, slot_tokens=stage.batch_tokens // cfg.num_slots,
            short_window=stage.short_window * cfg.window_block, long_window=long_window * cfg.window_block,
            mtp_weights=tuple(mtp_weights), rotary=self.rotary[k], momentum=self.momentum_at(place),
            normuon_lr=cfg.normuon_lr * factor, adam_lr=cfg.adam_lr * factor,
            adam_step=step % cfg.adam_every == cfg.adam_every - 1, tied=step <= self.untie_step,
            untie=step == self.untie_step, validate=cfg.val_every > 0 and step % cfg.val_every == 0)

    def warm_up_steps(self):
        """Return the steps of whole run cycles around the start of every stage, in which every graph occurs."""
        # The largest stage comes first, so that a lack of memory shows early; a cycle cut short comes last.
        cycles = {}                      # their first steps, each once
        for k in sorted(range(len(self.starts)), key=lambda k: -self.cfg.stages[k].batch_tokens):
            first = self.starts[k] // self.cycle * self.cycle
            cycles |= {first: None, first + self.cycle: None}
        steps = []
        for first in sorted(cycles, key=lambda first: first + self.cycle > self.end_step):
            steps += range(first, min(first + self.cycle, self.end_step))
        return steps


# ====== Room 3: Data ==================================================================================================
SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024                  # table in data/README.md
TOKEN_BYTES = 2                          # little-endian u16
MANIFEST_FORMATS = (1, 2)                # of data, and of saves and checkpoints
MANIFEST = "manifest.json"               # hashes of the files beside it, written last; table in data/README.md
VOCABULARY = "vocab.txt"                 # bytes of the tokens of the files beside it
HASH_CURRENT, HASH_PREVIOUS = 36313, 27191                                    # RECIPE 2.5
SIGN_VECTORS = 8192                      # of random signs; one more has +1 alone
LONG_PATIENCE = 10                       # ranks may be that many timeouts apart while they compile, or one writes files
FORMULA = "formula:"                     # formula:VOCAB:DOCUMENT_START:TOKENS:SHARDS, tokens without a file
FORMULA_MIX = 0x9E3779B97F4A7C15         # 2^64 over the golden ratio: products of neighbours look unrelated at the top
FORMULA_DOCUMENT = 32                    # tokens, on average

class ShardHeader(NamedTuple):
    """One shard: a file, or a formula that makes its tokens."""
    name: str
    tokens: int
    vocab_size: int
    document_start: int

    @property
    def vocabulary(self):
        return self.vocab_size, self.document_start

class Shard:
    """Tokens of one shard in memory, (tokens,) u16, and where its documents start."""
    def __init__(self, tokens: np.ndarray, document_start: int):
        self.tokens = tokens
        self.doc_starts = np.flatnonzero(tokens == document_start)
        self.doc_lengths = np.diff(self.doc_starts, append=len(tokens))

class Slot(NamedTuple):
    """One slot of T tokens on the host."""
    tokens: np.ndarray                   # (T + 1,) u16: inputs are the first T, targets the last T
    cu_seqlens: np.ndarray               # (documents + 1,) i32: 0, then the end of each document in the inputs, last T;
                                         # the first or last document may be empty

def formula_tokens(seed: int, count: int, vocab_size: int, document_start: int):
    """Make (count,) u16 tokens from their positions and the seed alone: for the tiny preset and the warm-up."""
    position = np.arange(count, dtype=np.uint64) + (seed << 32)
    mixed = position * FORMULA_MIX >> 40                                      # 24 bits, of a product that wraps
    drawn = mixed * mixed // 7 % (vocab_size - 1)
    drawn += drawn >= document_start                                          # any token but the document start
    drawn[mixed % FORMULA_DOCUMENT == 0] = document_start
    drawn[:1] = document_start
    return drawn.astype(np.uint16)

def find_shards(pattern: str):
    """Return the headers of all shards of a pattern in name order, checked. Raises DataError."""
    if pattern.startswith(FORMULA):
        need(re.fullmatch(FORMULA + r"\d{1,5}:\d{1,5}:\d{1,9}:[1-9]\d{0,4}", pattern), "formula", pattern,
             "formula:VOCAB:DOCUMENT_START:TOKENS:SHARDS", "for example formula:512:511:40000:2", DataError)
        vocab, start, tokens, shards = map(int, pattern.removeprefix(FORMULA).split(":"))
        return [ShardHeader(f"{pattern}#{seed}", tokens, vocab, start) for seed in range(shards)]
    # Brackets in the name of a folder mean themselves; what matches nothing may still be the name of a file. Whatever
    # matches has to be a shard: silently skipping a broken link would train on less data.
    folder, name = os.path.split(pattern)
    if os.path.isdir(folder):
        folder = glob.escape(folder)
    paths = sorted(glob.glob(os.path.join(folder, name))) or [pattern]
    return [read_header(Path(path)) for path in paths]

def read_header(path: Path):
    """Return the header of a shard, its first 1,024 bytes, checked with its length. Raises DataError."""
    need(path.is_file(), f"{path} as a shard", f"no such file, or no regular one, seen from {os.getcwd()}",
         "a .bin shard", "preset pocket: run where data/pocket is, as in a clone; preset record: python "
         "data/cached_fineweb10B.py 9; other data: give --train_files= and --val_files=", DataError)
    size = path.stat().st_size
    words = np.fromfile(path, "<i4", HEADER_BYTES // 4)
    words.resize(HEADER_BYTES // 4)                                           # zeros if the file is shorter
    magic, version, count, vocab, start = words[:5].tolist()
    need([magic, version] == [SHARD_MAGIC, SHARD_VERSION] and count >= 0 and HEADER_BYTES + TOKEN_BYTES * count == size,
         f"{path} as a shard", f"{size} bytes that begin with {magic}, {version}, {count}",
         f"a header of {HEADER_BYTES} bytes that begins with {SHARD_MAGIC}, {SHARD_VERSION} and the number of tokens, "
         f"then {TOKEN_BYTES} bytes for each", "the file is cut, still being written, or none (data/README.md has the "
         "format): fetch or write it again", DataError)
    if vocab == 0:                                                            # old shards leave both words 0
        vocab, start = GPT2_VOCAB, GPT2_DOCUMENT_START
    return ShardHeader(str(path), count, vocab, start)

def read_manifest(folder: Path):
    """Return the sha256 of each file that a folder's manifest names; {} without a manifest. Raises DataError."""
    path = folder / MANIFEST
    need(not os.path.lexists(f"{path}.part"), f"{path}.part", "a tool was stopped while it gave the files their names",
         "files that belong together", "run that tool again, then this", DataError)
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] not in MANIFEST_FORMATS:
            raise ValueError(f"format {manifest['format']}")
        return {name: facts["sha256"] for name, facts in manifest["files"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} as a manifest", f"{type(error).__name__}: {error}", "format 1 or 2, as data/README.md "
                        "has it", "write the folder again, or remove this file if those beside it are sound") from None

def check_manifest(path: Path, content: bytes):
    """Raise DataError if the manifest beside a file says that it had another content."""
    expected = read_manifest(path.parent).get(path.name)
    if expected is not None:
        sha256 = hashlib.sha256(content).hexdigest()
        need(sha256 == expected, f"{path}: content", f"sha256 {sha256}", f"{expected}, says {MANIFEST} beside it",
             "the file is damaged, or a mixture of two data sets: write the data again, "
             f"or remove {MANIFEST} if this content is meant", DataError)

def load_shard(header: ShardHeader):
    """Return a shard, read or made by its formula, with every token checked. Raises DataError."""
    name = header.name
    if name.startswith(FORMULA):
        tokens = formula_tokens(int(name.rpartition("#")[2]), header.tokens, *header.vocabulary)
        if name.startswith(f"{FORMULA}warm-up"):
            # Repeat n-grams, as text does, so that copy_embed has the rows that decide its graphs in validations.
            blocks = tokens[:len(tokens) // 64 * 64].reshape(-1, 64)
            blocks[:, 8:16] = blocks[:, :8]
    else:
        tokens = np.fromfile(name, "<u2", header.tokens, offset=HEADER_BYTES)
    shard = Shard(tokens, header.document_start)
    largest = tokens.max(initial=0)
    need(len(tokens) == header.tokens and largest < header.vocab_size and len(shard.doc_starts), f"{name}: content",
         f"{len(tokens)} tokens up to {largest}, {len(shard.doc_starts)} of them document starts",
         f"{header.tokens} tokens below the vocabulary size {header.vocab_size}, and token {header.document_start} "
         "before every document", "fetch or write the shard again, and let nobody change it during a run", DataError)
    return shard

def scan_shards(headers: list):
    """Check every token of every shard; return the hash of all names and contents, in order. Raises DataError."""
    # The name of a formula says everything.
    digest = hashlib.sha256()
    for header in headers:
        path = Path(header.name)
        digest.update(os.fsencode(path.name))                                 # a name may be any bytes
        if not header.name.startswith(FORMULA):
            content = path.read_bytes()
            digest.update(content)
            check_manifest(path, content)
            load_shard(header)
    return digest.hexdigest()

def resolve(cfg: Config, train: list[ShardHeader], val: list[ShardHeader]):
    """Return the config with the sizes that shard headers decide. Raises DataError or ConfigError if two disagree."""
    first = train[0]
    for other in train + val:
        need(other.vocabulary == first.vocabulary, "shards of different vocabularies",
             f"{other.vocabulary} in {other.name}", f"{first.vocabulary} (size, document start) as in {first.name}",
             "give one data set only", DataError)
    vocab_size, document_start = first.vocabulary
    need(0 <= document_start < vocab_size <= 2**16, f"{first.name}: vocabulary", f"{first.vocabulary} (size, document "
         "start)", "document start < size <= 65536, for tokens are u16", "write the shards again", DataError)
    for name, stored in (("vocab_size", vocab_size), ("document_start", document_start)):
        given = getattr(cfg, name)
        need(given in (getattr(Config, name), stored), f"--{name}", given, f"{stored}, header of {first.name}",
             "leave the flag out")
    padded = cfg.padded_vocab or -(-vocab_size // 128) * 128
    need(padded >= vocab_size, "--padded_vocab", padded, f"at least the vocabulary size {vocab_size}",
         "--padded_vocab=0")
    bigram_rows = max(2, cfg.bigram_rows or 5 * padded)                       # one for pairs, one for no pair
    return replace(cfg, vocab_size=vocab_size, document_start=document_start, padded_vocab=padded,
                   bigram_rows=bigram_rows)

def check_enough_data(cfg: Config, schedule: Schedule, train: list[ShardHeader], val: list[ShardHeader]):
    """Raise DataError before anything is built if the shards cannot last for the plan, or hold too few whole blocks."""
    # A lower bound: packing drops ends of documents and of shards. With --time_budget nobody knows the steps yet.
    last = min(cfg.max_steps or schedule.total_steps, schedule.total_steps)
    counts = np.diff(np.minimum((0, *schedule.ends), last)).tolist()          # steps of each stage
    blocks = [stage.batch_tokens + cfg.num_slots for stage in cfg.stages]     # a slot has one more, its last target
    needed = sum(count * tokens for count, tokens in zip(counts, blocks))
    have = cfg.epochs * sum(header.tokens for header in train)
    need(cfg.epochs == 0 or cfg.time_budget or needed <= have, "too few training tokens",
         f"{have} in {len(train)} shards of {cfg.train_files!r}", f"{needed} for {sum(counts)} steps",
         "--epochs=0 reads them again and again; or more shards (FineWeb: python data/cached_fineweb10B.py N), or "
         "fewer --num_scheduled_steps", DataError)
    # A block never crosses a border of shards.
    largest_block = max(tokens for count, tokens in zip(counts, blocks) if count > 0)
    largest_shard = max(header.tokens for header in train)
    unit = SLOT_UNIT * cfg.num_slots
    fits = max(0, largest_shard - cfg.num_slots) // unit * unit
    need(largest_block <= largest_shard, "training shards are too small", f"at most {largest_shard} tokens in one",
         f"{largest_block} for a step's batch", f"more text, or batches in --stages of at most {fits} tokens",
         DataError)
    tokens = sum(whole_blocks(header.tokens, cfg.val_batch_tokens) for header in val)
    fits = tokens or max(whole_blocks(header.tokens, unit) for header in val)
    need(tokens >= cfg.val_tokens, "too few validation tokens", f"{tokens} in blocks of {cfg.val_files!r}",
         cfg.val_tokens, f"more text; as much as this gives is --val_tokens={fits} "
         f"--val_batch_tokens={min(fits, cfg.val_batch_tokens)}, and {unit + 2} tokens in a shard are the fewest",
         DataError)

def pack_block(shard: Shard, first_doc: int, num_slots: int, slot_tokens: int, max_doc_len: int):
    """Deal documents to the slots of a block in stream order (RECIPE 5.2).
    Returns (slots, next document), or None where the shard ends too early. A slot is (starts, ends) of its pieces."""
    # Of documents cut to max_doc_len: tokens before each one, and before the end.
    tokens_before = np.concatenate([[0], np.cumsum(np.minimum(shard.doc_lengths, max_doc_len))])
    # Each slot takes documents until it has slot_tokens + 1 tokens; the last one is cut to fit, and its rest is lost:
    # the next slot begins with a fresh document.
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

def make_slot(shard: Shard, starts: np.ndarray, ends: np.ndarray):
    """Return the slot that consists of these pieces of a shard."""
    pieces = [shard.tokens[start:end] for start, end in zip(starts.tolist(), ends.tolist())]
    cu_seqlens = np.concatenate([[0], np.cumsum(ends - starts)])
    cu_seqlens[-1] -= 1                                                       # the last token is a target only
    return Slot(np.concatenate(pieces), cu_seqlens.astype(np.int32))

def whole_blocks(shard_tokens: int, block_tokens: int):
    """Count tokens of a shard's whole validation blocks; 2 stay out: the last target, and one more as in the peer."""
    return max(0, shard_tokens - 2) // block_tokens * block_tokens

def validation_slots(shards: Iterable[Shard], num_slots: int, slot_tokens: int, document_start: int):
    """Yield consecutive slots in whole blocks of num_slots, not aligned to documents, none of which is cut short."""
    for shard in shards:
        for start in range(0, whole_blocks(len(shard.tokens), num_slots * slot_tokens), slot_tokens):
            tokens = shard.tokens[start:start + slot_tokens + 1]
            borders = np.flatnonzero(tokens[:-1] == document_start)
            yield Slot(tokens, np.concatenate([[0], borders, [slot_tokens]]).astype(np.int32))

def ngram_hash(tokens: np.ndarray, factors: tuple, modulus: int, none: int):
    """Hash the n-gram that ends at each position of a slot, (..., T) i32 -> (..., T) i32 below modulus.
    The first n - 1 positions get `none`. N-grams cross documents, as recipe A's bigrams do."""
    # The xor of token x factor, factors from the newest token backwards, in 32-bit arithmetic that wraps; floor modulo.
    mixed = tokens * factors[0]
    for back, factor in enumerate(factors[1:], 1):
        mixed[..., back:] ^= tokens[..., :-back] * factor
    hashed = mixed - mixed // modulus * modulus                               # numpy has vector code for //, none for %
    hashed[..., :len(factors) - 1] = none
    return hashed

def bigram_hash(tokens: np.ndarray, rows: int):
    """Return the row of each (previous, current) token pair of slots, (..., T) i32 -> (..., T) i32 in [0, rows).
        row = ((36313 * current) xor (27191 * previous)) mod (rows - 1);  the last row means: no pair"""
    # Two quirks of the peer are part of its published losses. Pairs cross documents. And position 0 is overwritten with
    # no_pair before the products, so that position 1 finds no_pair as its previous token.
    no_pair = rows - 1
    overwritten = tokens.copy()
    overwritten[..., 0] = no_pair
    return ngram_hash(overwritten, (HASH_CURRENT, HASH_PREVIOUS), no_pair, none=no_pair)

class Candidates:
    """The tokens that followed the longest known n-gram at each position, from one search per batch."""
    def __init__(self, vocab: int, document_start: int, modulus: int):
        """modulus: the row of copy_embed for positions without a known n-gram."""
        self.vocab = vocab
        self.document_start = document_start
        self.modulus = modulus
        self.latest = None, ()           # tokens, and what `of` returns for them

    def of(self, tokens: np.ndarray):
        """Return for each position of some slots, (b, T) i32 -> three arrays (b, T) i32:
        kind    0: no n-gram is known; else 1 + EVIDENCE * index in COPY_NGRAMS of the longest one + its evidence
        first   the token that followed its last occurrence; the position's own token for kind 0
        second  the token that followed the occurrence before that if it differs; else the position's own token
        An n-gram is known if it occurs earlier in the same document and slot, so no later token is read."""
        if self.latest[0] is not tokens:
            self.latest = tokens, self.search(tokens)
        return self.latest[1]

    def search(self, tokens: np.ndarray):
        starts = tokens == self.document_start
        starts[:, 0] = True                                                   # of a slot, perhaps inside a document
        flat = tokens.ravel()
        kind, first, second = np.zeros_like(flat), flat.copy(), flat.copy()
        # Hashes of each position's document and last n tokens. Equal ones are neighbors when sorted, oldest first.
        keys = np.cumsum(starts).astype(np.uint64)
        for n in range(1, max(COPY_NGRAMS) + 1):
            keys = keys * np.uint64(COPY_FACTOR) + np.roll(flat, n - 1).astype(np.uint64)
            if n not in COPY_NGRAMS:
                continue
            order = np.argsort(keys, kind="stable")
            is_known = (np.diff(keys[order]) == 0) & (order[:-1] % tokens.shape[1] >= n - 1)
            before, here = order[:-1][is_known], order[1:][is_known]
            kind[here] = 1 + EVIDENCE * COPY_NGRAMS.index(n)
            first[here] = flat[before + 1]
            second[here] = flat[here]
            # Where two neighboring pairs are known, the first occurrence of the first pair is the last but one.
            twice = is_known[:-1] & is_known[1:]
            oldest, before, here = order[:-2][twice], order[1:-1][twice], order[2:][twice]
            differs = flat[oldest + 1] != flat[before + 1]
            kind[here] += 1 + differs
            second[here[differs]] = flat[oldest[differs] + 1]
        return [part.reshape(tokens.shape) for part in (kind, first, second)]

    def kinds(self, tokens: np.ndarray):
        """Return the kind of each position, (b, T) i32."""
        return self.of(tokens)[0]

    def copy_rows(self, tokens: np.ndarray):
        """Return the row of copy_embed for each position, (b, T) i32: one per n-gram length and first token."""
        kind, first, _ = self.of(tokens)
        length = (kind - 1) // EVIDENCE
        return np.where(kind > 0, (length * self.vocab + first) % self.modulus, self.modulus).astype(np.int32)

    def embed_rows(self, tokens: np.ndarray):
        """Return the rows of `embed` for each position, (b, 3, T) i32: its own token and both candidates."""
        _, first, second = self.of(tokens)
        return np.stack((tokens, first, second), axis=1)

# What the tokenizer of data/pocket can produce next. It cuts a text into pieces: a line break with indentation, a word,
# a sign, or blanks (PIECE_RE in data/pocket.py); a blank before a word or a sign is part of it. A piece is one token if
# it is in the vocabulary, and else the tokens of its bytes. A document may begin inside of a piece.
(ANYTHING, AFTER_WORD, AFTER_BLANKS, AFTER_SPACE, IN_WORD, IN_KNOWN_WORD, IN_BLANKS, IN_KNOWN_BLANKS) = range(8)
STATES = 8
WORD_BYTES = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz")
BLANK_BYTES = frozenset(b" \t\n\r\f\v")

class Grammar:
    """An automaton over tokens, whose states say what can come next. Without a vocabulary, everything can."""
    def __init__(self, vocabulary: list[bytes] | None, vocab: int):
        self.tokens = (vocabulary or []) + [b""] * (vocab - len(vocabulary or []))
        self.pieces = {text for text in self.tokens if len(text) > 1}
        self.prefixes = {text[:n] for text in self.pieces for n in range(1, len(text) + 1)}
        # A node is what is known: a state's name, or the bytes of a piece that is being spelled.
        self.nodes = {"anywhere": 0}
        self.kinds = [ANYTHING]
        self.next = []
        while len(self.next) < len(self.nodes):
            node = list(self.nodes)[len(self.next)]
            self.next.append([self.number(self.after(node, text)) for text in self.tokens])

    def number(self, node: str | bytes):
        if node not in self.nodes:
            self.nodes[node] = len(self.nodes)
            self.kinds.append(self.kind(node))
        return self.nodes[node]

    def kind(self, node: str | bytes):
        named = {"anywhere": ANYTHING, "new": ANYTHING, "word": AFTER_WORD, "blanks": AFTER_BLANKS,
                 "long word": IN_WORD, "long blanks": IN_BLANKS, b" ": AFTER_SPACE}
        if node in named:
            return named[node]
        known = node in self.pieces                           # then it goes on: as a whole it would be one token
        if node[-1] in WORD_BYTES:
            return IN_KNOWN_WORD if known else IN_WORD
        return IN_KNOWN_BLANKS if known else IN_BLANKS

    def after(self, node: str | bytes, text: bytes):
        """Return the node that follows this one after the token with this text."""
        if not text:                                          # the start of a document
            return "anywhere"
        is_word = text[-1] in WORD_BYTES
        is_blank = text[-1] in BLANK_BYTES
        if len(text) > 1:
            return "word" if is_word else "blanks" if is_blank else "new"
        if not is_word and not is_blank:                      # a sign ends its piece
            return "new"
        if node == "anywhere":
            return "anywhere"
        if node == "long word" and is_word or node == "long blanks" and is_blank:
            return node
        spelled = text
        if isinstance(node, bytes) and (node == b" " or (node[-1] in WORD_BYTES) == is_word):
            spelled = node + text
        if spelled in self.prefixes or len(spelled) == 1:
            return spelled
        return "long word" if is_word else "long blanks"

    def states(self, tokens: np.ndarray):
        """Return the state after each token, (b, T) i32 -> (b, T) i32."""
        states = np.empty_like(tokens)
        for row, out in zip(tokens.tolist(), states):
            node = 0
            nodes = [node := self.next[node][token] for token in row]
            out[:] = [self.kinds[node] for node in nodes]
        return states

    def logits(self):
        """Return what is added to the logit of each token in each state, (STATES, V): 0 or IMPOSSIBLE."""
        added = torch.zeros(STATES, len(self.tokens))
        for token, text in enumerate(self.tokens):
            if text:
                is_word = text[0] in WORD_BYTES
                is_blank = text[0] in BLANK_BYTES
                impossible = {
                    AFTER_WORD: is_word, AFTER_BLANKS: is_blank, AFTER_SPACE: len(text) > 1,
                    IN_WORD: is_word and len(text) > 1, IN_KNOWN_WORD: not is_word or len(text) > 1,
                    IN_BLANKS: is_blank and len(text) > 1, IN_KNOWN_BLANKS: not is_blank or len(text) > 1}
                added[[state for state, holds in impossible.items() if holds], token] = IMPOSSIBLE
        return added

def spellings(vocabulary: list[bytes] | None):
    """Return two index arrays, (n,) i64 each: tokens, ascending, and a spelling that the token shares with others."""
    tokens_of: dict[tuple, list[int]] = {}
    for token, text in enumerate(vocabulary or []):
        text = text.decode("latin1")
        word = text.strip()
        found = [("blank before", text[:1] == " ", text[:1] == "\n")]
        if word:
            case = "upper" if word.isupper() else "title" if word[0].isupper() else "lower"
            sort = "word" if word[0].isalpha() or word[0] == "_" else "digit" if word[0].isdigit() else "sign"
            found += [("sort", sort, case, len(word) == 1), ("letters", word.lower())]
        else:
            found += [("sort", "blank" if text else "start")]
        if word and len(text) > 1:
            found += [("first", word[0].lower()), ("last", word[-1]), ("last two", word[-2:]),
                      ("last three", word[-3:]), ("length", min(len(word), 12))]
        if text[:1] == "\n":
            found += [("indentation", len(text) - len(text.rstrip(" "))), ("lines", text.count("\n"))]
        for spelling in found:
            tokens_of.setdefault(spelling, []).append(token)
    shared = [tokens for tokens in tokens_of.values() if len(tokens) > 1]
    pairs = sorted((token, number) for number, tokens in enumerate(shared) for token in tokens)
    return np.asarray(pairs, np.int64).reshape(-1, 2).T

class Table(NamedTuple):
    """An embedding of which a step reads few rows: what its row of the parameter table keeps as `rows`."""
    label: str
    rows: int                            # R
    reads: int                           # rows that a token reads
    ids: Callable[[np.ndarray], np.ndarray]      # tokens (b, T) i32 -> logical rows (b, T) or (b, reads, T) i32
    tied: bool = False                   # its weights are the head's until the two are untied
    is_rowwise: bool = False             # an update moves the rows that were asked for; else all rows of a slice
    home: str = "device"                 # where an owner keeps its rows
    cadence: int = 2                     # steps between updates
    rounding: str = "nearest"            # of bf16 rows after a rowwise update
    signs: Callable[[np.ndarray], np.ndarray] | None = None       # tokens (b, T) i32 -> vectors of signs (b, T) i32

def row_tables(cfg: Config) -> tuple[Table, ...]:
    """Return the row tables, recipe A's three and those of n-grams, with their functions from tokens to rows."""
    V = cfg.padded_vocab
    first_rows = V * np.arange(NUM_VALUE_TABLES, dtype=np.int32)[:, None]     # value tables stand one below the other

    def value_rows(tokens: np.ndarray):
        return tokens[:, None] + first_rows

    tables = [
        Table("bigram_embed", cfg.bigram_rows, 1, functools.partial(bigram_hash, rows=cfg.bigram_rows),
              cadence=cfg.adam_every),
        Table("value_embed", NUM_VALUE_TABLES * V, NUM_VALUE_TABLES, value_rows, cadence=cfg.adam_every),
        Table("embed", V, 1, np.asarray, tied=True, cadence=cfg.adam_every)]             # a token's row is its own id
    for ngram in cfg.tables:
        factors, sign_factors = NGRAM_FACTORS[ngram.order]
        ids = functools.partial(ngram_hash, factors=factors, modulus=ngram.rows - 1, none=ngram.rows - 1)
        signs = None
        if ngram.order == COPY:
            candidates = Candidates(V, cfg.document_start, ngram.rows - 1)
            ids, signs = candidates.copy_rows, candidates.kinds
            tables[RECIPE_TABLES.index("embed")] = tables[RECIPE_TABLES.index("embed")]._replace(
                reads=3, ids=candidates.embed_rows)
        if ngram.signs:
            signs = functools.partial(ngram_hash, factors=sign_factors, modulus=SIGN_VECTORS, none=SIGN_VECTORS)
        tables.append(Table(ngram.label, ngram.rows, 1, ids, is_rowwise=True, home=ngram.home, cadence=ngram.cadence,
                            rounding=ngram.rounding, signs=signs))
    return tuple(tables)

@dataclass(eq=False)
class RowUpdate:
    """The rows of this rank's shard that a row-wise update changes: those that any rank reads in the cycle."""
    # Rows that the update before changes as well are on the device already, and newer there than in a host home.
    places: Tensor                       # (u,) i64 in the shard, ascending
    inverse: Tensor                      # (requested,) i64: index into `places` of each requested row
    follows: RowUpdate | None            # the update before; None: there is none
    fresh: Tensor                        # (f,) i64: index into `places` of the rows that the update before has not
    kept: Tensor                         # (u - f,) i64: index into `places` of those that it has,
    kept_from: Tensor                    # (u - f,) i64: and the index of the same rows into its places

def distinct_with_places(values: np.ndarray):
    """Return the distinct values, integers below 2^32, ascending, and the index of each value in them, both i64."""
    # One sort of 64-bit words, the value above its position: several times as fast as numpy's unique with its inverse.
    count = len(values)
    words = np.sort(values.astype(np.uint64) << 32 | np.arange(count, dtype=np.uint64))
    ordered = (words >> 32).astype(np.int64)
    is_new = np.diff(ordered, prepend=-1) > 0
    index = np.empty(count, np.int64)
    index[words & 0xFFFFFFFF] = np.cumsum(is_new) - 1
    return ordered[is_new], index

def row_update(requested: np.ndarray, before: RowUpdate | None, fabric: Fabric):
    """Return the update of the requested rows, given as places in the shard; before: the update that it follows."""
    places, inverse = distinct_with_places(requested)
    places_before = np.empty(0, np.int64) if before is None else before.places.numpy()
    _, kept, kept_from = np.intersect1d(places, places_before, assume_unique=True, return_indices=True)
    fresh = np.delete(np.arange(len(places)), kept)
    places, inverse, *lists = map(fabric.host_tensor, (places, inverse, fresh, kept, kept_from))
    return RowUpdate(places, inverse, before, *lists)

@dataclass(eq=False)
class TablePlan:
    """The rows of a table that this rank reads in a cycle, and the rows of its shard that all ranks request.
    Logical row r is the r div W-th in the shard of rank r mod W; physical rows are numbered shard by shard. Lists are
    tensors on the host until the cycle's rows are fetched."""
    tag: dict[str, Any]                  # purpose, cycle, tokens (of a slot over the cycle): equal on all ranks
    shard_size: int                      # rows of every rank's shard: R / W, rounded up
    my_rows: Tensor                      # (n,) i64, physical, ascending: fetched before the cycle, gradients go back
    send_counts: list[int]               # by owner: how many of my_rows this rank requests of it
    requested_rows: Tensor               # i64 places in this rank's shard, reader by reader
    recv_counts: list[int]               # by reader: how many of them it requests
    head_columns: Tensor | None          # (n,) i64: my_rows as columns of the head, while head and embedding are tied
    plan_ms: float                       # time of `Planner.plan`
    reads: int                           # lookups, repeated rows included
    update: RowUpdate | None = None      # of a row-wise table, once `RowTable.prepare` has seen the plan
    sent: int = 0                        # bytes to and from other ranks, counted where a collective is called
    received: int = 0

    @property
    def tied(self) -> bool:
        # Rows are read from the head, which every rank has: nothing travels.
        return self.head_columns is not None

    def change_lists(self, change: Callable):
        """Replace each list of rows by change(list), its copy on the device."""
        self.my_rows = change(self.my_rows)
        self.requested_rows = change(self.requested_rows)
        if self.tied:
            self.head_columns = change(self.head_columns)

    def count_bytes(self, rank: int, send_counts: list[int], recv_counts: list[int], item_bytes: int):
        """Count what an exchange of lists moves between this rank and others; counts are items by rank."""
        self.sent += (sum(send_counts) - send_counts[rank]) * item_bytes
        self.received += (sum(recv_counts) - recv_counts[rank]) * item_bytes

class Batch(NamedTuple):
    """This rank's slots of one step, b of them."""
    step: int
    plans: dict[str, TablePlan]          # by table, shared by the steps of a cycle
    tokens: Tensor                       # (b, T) i32
    targets: Tensor                      # (b, T) i64: the next token
    cu_seqlens: Tensor                   # (b, K) i32: 0, document ends, then T as often as needed to fill K columns
    rows: dict[str, Tensor]              # by table, shaped like its ids: index into the plan's list, or into the table
    signs: dict[str, Tensor] = {}        # by table that has signs, (b, T) i32: which vector of signs; or kinds to copy
    states: Tensor | None = None         # (b, T) i32: states of Grammar
    classes: Tensor | None = None        # (b, C) i64: tokens in the softmax, in each row the same; targets are indices
    class_logits: Tensor | None = None   # (b, C) f32: added to their logits

    def map(self, change: Callable) -> Batch:
        def each(part):
            if isinstance(part, dict):
                return {label: change(x) for label, x in part.items()}
            return None if part is None else change(part)

        step, plans, *arrays = self
        return Batch(step, plans, *map(each, arrays))

    def to(self, device: torch.device) -> Batch:
        return self.map(operator.methodcaller("to", device, non_blocking=True))

@dataclass
class Planner:
    """Makes the batches of a cycle and their row plans. Pure, but for the exchange with other ranks."""
    cfg: Config
    fabric: Fabric
    exchange: Callable | None = None     # puts into plans what other ranks request of this one; None: nothing
    trains: bool = False                 # choose classes of the softmax

    def __post_init__(self):
        self.tables = row_tables(self.cfg)
        self.grammar = read_grammar(self.cfg)
        self.shard_sizes = {table.label: -(-table.rows // self.fabric.world) for table in self.tables}

    def batches(self, purpose: str, steps: list[Values], slots: list):
        """Return a batch for each step of a run's cycle, from this rank's slots of each."""
        # Slots differ in their number of documents, but a tensor's rows have one length.
        batches = []
        for values, slots_of_step in zip(steps, slots):
            tokens = np.stack([slot.tokens for slot in slots_of_step])
            borders = [slot.cu_seqlens for slot in slots_of_step]
            columns = max(map(len, borders))
            borders = np.stack([np.pad(x, (0, columns - len(x)), "edge") for x in borders])
            inputs = tokens[:, :-1].astype(np.int32)
            signs = {table.label: table.signs(inputs) for table in self.tables if table.signs}
            targets = tokens[:, 1:].astype(np.int64)
            states = self.grammar.states(inputs)
            classes = class_logits = None
            if self.trains:
                targets, *chosen = choose_classes(targets, self.cfg.padded_vocab, values.step, purpose)
                classes, class_logits = (np.tile(x, (len(targets), 1)) for x in chosen)
            batches.append(Batch(values.step, {}, inputs, targets, borders, {}, signs, states, classes, class_logits))

        # A table's plan serves the steps of its cadence; where one ends, the next begins.
        current = {}
        every = self.cfg.adam_every
        for first in range(0, len(steps), every):
            begun = {}
            for table in self.tables:
                if first % table.cadence == 0:
                    begun[table.label] = self.plan(table, purpose, steps[first], batches[first:first + table.cadence])
            if self.exchange:
                self.exchange(begun)
            current |= begun
            for batch in batches[first:first + every]:
                batch.plans.update(current)
        return [batch.map(self.fabric.host_tensor) for batch in batches]

    def plan(self, table: Table, purpose: str, values: Values, batches: list[Batch]):
        """Return the plan of a table's rows for its cycle. Puts the index of each lookup into the batches, an array."""
        # Rows are dealt to ranks in turn: frequent tokens have neighbouring ids, and owners are to share the work.
        began = time.perf_counter()
        W = self.fabric.world
        size = self.shard_sizes[table.label]
        tied = table.tied and values.tied                                     # for the whole cycle: untying ends one
        ids = [table.ids(batch.tokens) for batch in batches]
        logical = np.concatenate([x.ravel() for x in ids])
        place = logical.astype(np.int64) // W
        owner = logical - place * W                                           # logical mod W, with vector code
        physical = owner * size + place

        # Dense mode is a list of all rows. One rank reads a dense-Adam table where it stands, without a copy.
        my_rows, index = distinct_with_places(physical)
        if W == 1 and not table.is_rowwise:
            index = logical
        elif self.cfg.row_comms == "dense" and not table.is_rowwise and not tied:
            my_rows, index = np.arange(W * size), physical
        index = index.astype(np.int32)
        for batch, x in zip(batches, ids):
            batch.rows[table.label] = index[:x.size].reshape(x.shape)
            index = index[x.size:]

        # Alone, a rank requests its own rows; among several, the exchange puts in what the readers request.
        counts = np.bincount(my_rows // size, minlength=W).tolist()
        head_columns = None
        if tied:
            head_columns = self.fabric.host_tensor(my_rows % size * W + my_rows // size)      # logical again
        my_rows = self.fabric.host_tensor(my_rows)
        tag = dict(purpose=purpose, cycle=values.step // table.cadence,
                   tokens=sum(batch.tokens.shape[1] for batch in batches))
        plan_ms = 1000 * (time.perf_counter() - began)
        return TablePlan(tag, size, my_rows, counts, my_rows, counts, head_columns, plan_ms, reads=len(logical))

def choose_classes(targets: np.ndarray, vocab: int, step: int, purpose: str):
    """Return targets as indices into classes; CLASSES tokens; and what is added to their logits, f32.
    They are ALWAYS, all targets, and a random share p of the other tokens, which get log(1/p): so the sum of
    exponentials is unbiased."""
    certain = np.union1d(targets, ALWAYS)
    if purpose == "warm-up":                                  # more targets, from a formula
        certain = certain[:CLASSES]
    need(len(certain) <= CLASSES, "classes of the softmax", f"{len(certain)} in step {step}", f"{CLASSES} or fewer",
         "raise CLASSES", DataError)
    index = np.searchsorted(certain, targets).clip(max=CLASSES - 1)
    others = np.setdiff1d(np.arange(vocab), certain)
    drawn = np.random.default_rng(step).choice(others, CLASSES - len(certain), replace=False, shuffle=False)
    added = np.zeros(CLASSES, np.float32)
    added[len(certain):] = math.log(len(others) / max(1, len(drawn)))
    return index, np.concatenate((certain, drawn)), added

def bounded(future: Future, cfg: Config, what: str):
    """Return the result of a thread's work, or raise what it raised; RunError after --comm_timeout."""
    try:
        return future.result(timeout=cfg.comm_timeout)
    except TimeoutError:
        if future.done():                                     # the work's own, of a network's disk
            raise
        raise RunError(what, f"nothing after {cfg.comm_timeout} s", "an answer by then",
                       "look at disk and other ranks, or give a longer --comm_timeout") from None

class DataEnded(DataError):
    """No shard holds another block: raised on every rank for the same cycle."""

@dataclass
class Loader:
    """Batches of the run's cycles, made on a background thread exactly one cycle ahead; the same stream at every W.
    Taking a cycle starts the work on the next, so what a batch holds never depends on timing."""
    cfg: Config
    fabric: Fabric
    headers: list[ShardHeader]
    cycles: Iterable[list[Values]]       # each cycle's steps; the background thread takes them one by one
    exchange: Callable | None = None     # see Planner
    purpose: str = "train"

    def __post_init__(self):
        self.cycles = iter(self.cycles)
        self.planner = Planner(self.cfg, self.fabric, self.exchange, trains=True)
        self.worker = ThreadPoolExecutor(1, "loader", initializer=self.fabric.enter_thread)
        self.reader = ThreadPoolExecutor(1, "shard-reader")
        self.shards = self._read_ahead()
        self.shard = Shard(np.empty(0, np.uint16), 0)          # in use, from document doc on; at first an empty one
        self.doc = 0
        self.ahead = None                            # batches of the next cycle
        self.ready = []                              # batches of this cycle that are not taken yet
        self.plans_in_use = {}

    def skip(self, steps: Iterable[Values]):
        """Pass over the blocks of these steps, which a resumed run has trained with."""
        for values in steps:
            self._block(values)

    def start(self):
        """Begin to read. Called when the clock starts, for reading and packing are on it."""
        self.ahead = self.worker.submit(self._make_cycle)

    def wait(self):
        """Return the batches of the next cycle; [] after the last. Raises what went wrong in the thread."""
        return bounded(self.ahead, self.cfg, "waiting for the loader thread")

    def next(self, values: Values):
        """Return the batch of this step, on the device. Raises DataEnded."""
        if not self.ready:
            self.ready = self.wait()
            self.ahead = self.worker.submit(self._make_cycle)
        batch = self.ready.pop(0)
        self.plans_in_use = batch.plans
        assert batch.step == values.step, f"loader at step {batch.step}, run at {values.step}"
        return batch.to(self.fabric.device)

    def plans_ahead(self):
        """Return the row plans after those in use; None: the steps or the data end, and `next` will say so."""
        # A table's cycle may be shorter than the run's, and then the plans are here already.
        for batch in self.ready:
            if batch.plans != self.plans_in_use:
                return batch.plans
        try:
            batches = self.wait()
        except DataEnded:
            return None
        return batches[0].plans if batches else None

    def close(self):
        for pool in (self.worker, self.reader):
            pool.shutdown(wait=False, cancel_futures=True)

    def _make_cycle(self):
        """Return this rank's batches of the next cycle; runs on the worker thread."""
        cycle = next(self.cycles, [])
        my_slots = []
        for values in cycle:
            shard, block = self._block(values)
            pieces_of_slots = block[self.fabric.rank::self.fabric.world]
            my_slots.append([make_slot(shard, starts, ends) for starts, ends in pieces_of_slots])
        return self.planner.batches(self.purpose, cycle, my_slots)

    def _read_ahead(self):
        """Yield the shards of every pass; a second thread reads the next one while one is in use."""
        passes = range(self.cfg.epochs) if self.cfg.epochs else itertools.count()
        reads = (self.reader.submit(load_shard, header) for _ in passes for header in self.headers)
        for read, _ in itertools.pairwise(itertools.chain(reads, [None])):
            yield bounded(read, self.cfg, "reading a shard")

    def _block(self, values: Values):
        """Return the next block of slots: its shard, and (starts, ends) of the pieces of each slot."""
        # A block lies in one shard. Try the rest of the shard in use, which may be the empty one of the beginning, then
        # each shard once from its start, the one in use included.
        for _ in range(len(self.headers) + 1):
            packed = pack_block(self.shard, self.doc, self.cfg.num_slots, values.slot_tokens, self.cfg.max_doc_len)
            if packed is not None:
                slots, self.doc = packed
                return self.shard, slots
            self.shard = next(self.shards, None)
            self.doc = 0
            if self.shard is None:
                break
        raise DataEnded("training data ended",
                        f"{len(self.headers)} shards of {self.cfg.train_files!r}: enough for {values.step} steps",
                        f"room for {self.cfg.num_slots} x {values.slot_tokens + 1} tokens in one shard, at most "
                        f"{self.cfg.max_doc_len} of each document", "more or larger shards, a larger --max_doc_len, "
                        "--epochs=0 to read them again and again, or fewer steps by --max_steps")

@dataclass
class ValidationSet:
    """The validation slots in memory, and what is known of their text."""
    cfg: Config
    fabric: Fabric
    headers: list[ShardHeader]
    exchange: Callable | None = None     # see Planner
    purpose: str = "validation"

    def __post_init__(self):
        # Every rank keeps all slots, which are few, and takes its own at each validation.
        cfg = self.cfg
        self.planner = Planner(cfg, self.fabric, self.exchange)
        slot_tokens = cfg.val_batch_tokens // cfg.num_slots
        shards = map(load_shard, self.headers)                                # read only as far as they are needed
        slots = validation_slots(shards, cfg.num_slots, slot_tokens, cfg.document_start)
        self.slots = list(itertools.islice(slots, cfg.val_tokens // slot_tokens))

        # Entropy and bytes are those of the very tokens that are predicted.
        targets = np.concatenate([slot.tokens[1:] for slot in self.slots])
        counts = np.bincount(targets, minlength=cfg.vocab_size)
        shares = counts[counts > 0] / len(targets)
        self.unigram_nats = float(-(shares * np.log(shares)).sum())           # entropy of the targets' own distribution
        self.vocabulary = None
        name = self.headers[0].name
        if not name.startswith(FORMULA):
            self.vocabulary = read_vocabulary(Path(name).parent, cfg)
        self.bytes_per_token = None
        if self.vocabulary is not None:
            self.bytes_per_token = float(counts @ list(map(len, self.vocabulary)) / len(targets))

    def text_losses(self, loss: float):
        """Return bits per byte of a loss in nats per token, and the unigram entropy; {} where bytes are not known."""
        if self.bytes_per_token is None:
            return {}
        return dict(val_bpb=loss / math.log(2) / self.bytes_per_token, unigram_nats=self.unigram_nats)

    def batches(self, values: Values):
        """Yield the batches of this rank's slots, one for each block, on the device."""
        S = self.cfg.num_slots
        for first in range(0, len(self.slots), S):
            my_slots = self.slots[first + self.fabric.rank:first + S:self.fabric.world]
            batch, = self.planner.batches(self.purpose, [values], [my_slots])
            yield batch.to(self.fabric.device)

def read_vocabulary(folder: Path, cfg: Config):
    """Return the bytes of each token from a folder's vocab.txt, or None without one. Raises DataError."""
    # A line of the file is "base64 id"; the document start has no line and no bytes.
    path = folder / VOCABULARY
    if not path.is_file():
        return None
    content = path.read_bytes()
    check_manifest(path, content)
    bytes_of = {}
    with contextlib.suppress(ValueError):                                     # a line that is none: too few are read
        for line in content.splitlines():
            text, token = line.split()
            bytes_of[int(token)] = base64.b64decode(text, validate=True)
    need(bytes_of.keys() == set(range(cfg.vocab_size)) - {cfg.document_start}, str(path),
         f"{len(bytes_of)} tokens before a line that is none, or before the end", "lines 'base64 id' for all of "
         f"{cfg.vocab_size} tokens but the document start {cfg.document_start}", "write the data again, or remove the "
         "file: bits per byte are then not printed", DataError)
    return [bytes_of.get(token, b"") for token in range(cfg.vocab_size)]

@functools.cache
def read_grammar(cfg: Config):
    """Return the grammar of the vocabulary beside the training shards."""
    vocabulary = None if cfg.train_files.startswith(FORMULA) else read_vocabulary(Path(cfg.train_files).parent, cfg)
    return Grammar(vocabulary, cfg.padded_vocab)


# ====== Room 4: Kernels ===============================================================================================
# References in PyTorch specify each operation on every device; a Triton body stands beside the one it must match.
RMS_EPS = 2.0**-23                       # what the peer's bf16 run uses, here in every dtype
FP8_MAX = 448.0                          # largest e4m3 number
FP8_Y_SCALE = float(np.float32(100 / FP8_MAX))                                # the three scales of the head (RECIPE
FP8_W_SCALE = float(np.float32(1.6 / FP8_MAX))                                # 2.8), f32 numbers whose products are
FP8_GRAD_SCALE = float(np.float32(0.75 / FP8_MAX))                            # taken in f64 and rounded once
SHORTEST_BLOCK = 32                      # of queries: shorter ones would cost more in calls than they spare
ADD_ROWS_LINES = 8                       # gradient lines that a program adds at once
SIGN_SEED = 92                           # of the vectors of signs; any number would do
LOGITS_AT_ONCE = 1 << 19                 # in passes of a CPU: they and what is made of them stay in its cache

tl = None                                # triton.language, from the first launch on: only a GPU needs the package

@functools.cache
def jitted(kernel: Callable):
    """Return the kernel as Triton compiles it; its body finds `tl` among the names of this file."""
    triton = importlib.import_module("triton")
    globals()["tl"] = importlib.import_module("triton.language")
    return triton.jit(kernel)

def first_order(backward: Callable):
    """Refuse create_graph=True: weight gradients are written where autograd does not see them. Raises RunError."""
    # torch's once_differentiable raises nothing where the arriving gradient requires no grad.
    @functools.wraps(backward)
    def call(ctx, *grads):
        need(not torch.is_grad_enabled() or torch.compiler.is_compiling(), "a backward", "create_graph=True",
             "gradients of the first order", "leave it out, or use torch's own operations", RunError)
        return backward(ctx, *grads)
    return call

def accum_dtype(dtype: torch.dtype):
    """Dtype of accumulators and optimizer state for weights of this dtype: f32, but f64 in an f64 run."""
    return torch.promote_types(dtype, torch.float32)

def rms_norm(x):
    """x / sqrt(mean(x^2) + eps) over the last axis, no gain."""
    return F.rms_norm(x, (x.shape[-1],), eps=RMS_EPS)

def rotate(x, cos, sin):
    """Rotate neighbours (2i, 2i + 1) of the first half of a head by -angle; x (..., E), cos and sin of set_rotary."""
    # Factors as wide as a head cost fewer passes than its parts would: in its other half the angle is 0.
    neighbours_swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + neighbours_swapped * sin


# ---- Attention
@dataclass(frozen=True)
class AttentionSpan:
    """Reach and scale of attention: three fields, and `numbers`, a (3,) f64 tensor on the CPU with their values."""
    max_len: int                         # upper bound of a document's length, in positions
    window: int                          # keys before its own that a query sees at most
    scale: float                         # of the softmax

    def __post_init__(self):
        # A graph is compiled anew for each value of a field that it reads, but takes a tensor as an input.
        numbers = torch.tensor((self.max_len, self.window, self.scale), dtype=torch.float64, device="cpu")
        object.__setattr__(self, "numbers", numbers)          # frozen, so that they never differ from the fields

def attention_reference(q, k, v, cu_seqlens, span: AttentionSpan):
    """Do causal softmax attention inside documents, at the cost of N * window. q, k, v (N, H, E) -> (N, H, E).
    cu_seqlens (C,) i32 ascends from 0 to N, empty documents allowed."""
    # With blocks as long as its window, a query sees keys of its own block and of the one before, and no others.
    # Zeros stand before block 0 and fill the last one.
    count, heads, width = q.shape
    keys_back = min(span.window, span.max_len - 1)
    block = min(count, max(keys_back, SHORTEST_BLOCK))
    blocks = -(-count // block)
    fill = blocks * block - count
    queries = F.pad(q, (0, 0, 0, 0, 0, fill)).view(blocks, block, heads, width)
    padded = [F.pad(x, (0, 0, 0, 0, block, fill)).view(blocks + 1, block, heads, width) for x in (k, v)]
    keys, values = (torch.cat((x[:-1], x[1:]), dim=1) for x in padded)        # (blocks, 2 * block, H, E)

    # Positions before block 0 are negative: they index some document, and are masked.
    positions = torch.arange(blocks * block, device=q.device)
    document = torch.searchsorted(cu_seqlens.long(), positions, right=True)
    query_at = positions.view(blocks, block, 1)
    key_at = query_at[:, :1] + torch.arange(-block, block, device=q.device)   # (blocks, 1, 2 * block)
    in_window = (key_at >= 0) & (key_at <= query_at) & (key_at >= query_at - span.window)
    seen = in_window & (document[key_at] == document[query_at])
    heads_first = (x.transpose(1, 2) for x in (queries, keys, values))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=seen[:, None], scale=span.scale)
    return out.transpose(1, 2).reshape(blocks * block, heads, width)[:count]

def attention_varlen(q, k, v, cu_seqlens, span: AttentionSpan):
    """Compute attention_reference by torch's variable-length kernel (FA2, FA3, FA4): CUDA, bf16 or f16."""
    return Varlen.apply(q, k, v, cu_seqlens, span.numbers)

class Varlen(torch.autograd.Function):
    """torch's varlen attention with window, max length and scale as graph inputs: changing them recompiles nothing."""
    # Through torch's public `varlen_attn` they would be constants, and each stage would have graphs of its own.
    @staticmethod
    def forward(ctx, *inputs):
        out, *for_backward = varlen(*inputs)
        ctx.save_for_backward(*inputs, out, *for_backward)
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        return *varlen_backward(grad, *ctx.saved_tensors), None, None

def torchs_varlen():
    """Return torch's operations, which this import registers; it takes a second."""
    importlib.import_module("torch.nn.attention.varlen")
    return torch.ops.torch_attn

def varlen_arguments(cu_seqlens, numbers):
    """Return arguments of torch's forward and backward alike."""
    max_len, window, scale = numbers.tolist()                 # on the CPU: nothing waits
    return dict(cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=int(max_len), max_k=int(max_len), is_causal=False,
                scale=scale, window_size=[int(window), 0])    # keys seen before and after a query's own

@torch.library.custom_op("train_gpt::varlen", mutates_args=())
def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and for the backward the log-sum-exp and the state of a generator."""
    return torchs_varlen()._varlen_attn(q, k, v, **varlen_arguments(cu_seqlens, numbers))

@varlen.register_fake
def _(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *qkv, cu_seqlens, _ = inputs
    return torchs_varlen()._varlen_attn(*qkv, cu_seqlens, cu_seqlens, max_q=1, max_k=1)          # any length will do

@torch.library.custom_op("train_gpt::varlen_backward", mutates_args=())
def varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, numbers: Tensor,
                    out: Tensor, logsumexp: Tensor, generator: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torchs_varlen()._varlen_attn_backward(grad, q, k, v, out, logsumexp, rng_state=generator,
                                                 **varlen_arguments(cu_seqlens, numbers))

@varlen_backward.register_fake
def _(_: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, inputs[:3]))                           # of q, k and v


# ---- Products with weights that have a main_grad: the gradient adds up there, and autograd gets None.
FLAG = "grad_added_to_main_grad"         # a weight with it: True after a write, and its hooks get a dummy

class WeightPart(NamedTuple):
    """One matrix of a weight, and where its gradient goes."""
    # For a main_grad of its own a weight (R, C) needs main_grad = zeros (R, C) and writes = zeros (1,) i64 on the CPU
    # as attributes; then linear(x, as_part(weight)) adds there, and writes.zero_() clears it.
    weight: Tensor                       # the parameter
    matrix: Tensor                       # (R, C), all of it, or a view of a part
    main_grad: Tensor | None = None      # (R, C), the same part of the buffer; None: autograd keeps the gradient
    number: int = 0                      # of the part: its place in weight.writes, (parts,) i64 on the CPU
    delayed: list | None = None          # queue of products that wait for `flush`; the trainer itself delays nothing

def as_part(weight, delayed: list | None = None):
    """Return a weight (R, C) that is one matrix as its only part."""
    return WeightPart(weight, weight, getattr(weight, "main_grad", None), 0, delayed)

def bank_parts(bank, heights: tuple):
    """Return by layer the matrices of a bank (L, ..., C), which stand below each other with these heights."""
    shape = (len(bank), sum(heights), bank.shape[-1])
    layers = bank.view(shape).unbind()   # here and not in each layer: where autograd keeps it, one gradient per bank
    numbers = itertools.count()
    by_layer = []
    for depth, layer in enumerate(layers):
        wgrads = itertools.repeat(None)
        if hasattr(bank, "main_grad"):
            wgrads = bank.main_grad.view(shape)[depth].split(heights)         # an error unless it is one block
        by_layer.append([WeightPart(bank, *part) for part in zip(layer.split(heights), wgrads, numbers)])
    return by_layer

def wgrad_accumulate(main_grad: Tensor, writes: Tensor, number: int, a: Tensor, b: Tensor | None) -> None:
    """main_grad (+)= a^T b: the first write of a part since its clear overwrites whatever stands there.
    main_grad (R, C) is one matrix of a buffer, in f32, f64 or the dtype of a and b, and adds in its dtype. writes
    (parts,) i64 on the CPU counts since the clear. a (N, R), b (N, C); b None: a is the product itself, (R, C)."""
    # The count is read on the CPU, so that first and further writes are one graph. beta 0: what stands is not read.
    beta = min(int(writes[number]), 1)
    writes[number] += 1
    dtype = main_grad.dtype
    if b is None and beta == 0:
        main_grad.copy_(a)
    elif b is None:
        main_grad.add_(a)
    elif a.is_cuda and a.dtype != dtype:                                      # no copy: the product itself adds in f32
        torch.addmm(main_grad, a.t(), b, out_dtype=dtype, beta=beta, out=main_grad)
    else:
        main_grad.addmm_(a.t().to(dtype), b.to(dtype), beta=beta)

# What graphs call; eager code calls the function itself, for the op's dispatch takes 90 microseconds.
wgrad_op = torch.library.custom_op("train_gpt::wgrad_accumulate", wgrad_accumulate,
                                   mutates_args=("main_grad", "writes"))

def accumulate_wgrad(part: WeightPart, a, b: Tensor | None):
    """Put a^T b, or a if b is None, where the gradient of a part belongs. Returns what backward gives autograd."""
    if not part.weight.requires_grad:                                         # frozen: nothing is written
        return None
    if part.delayed is not None:
        part.delayed.append((part, a, b, versions_of(a, b)))
    elif part.main_grad is None:
        return a if b is None else a.t() @ b
    else:
        write = wgrad_op if torch.compiler.is_compiling() else wgrad_accumulate
        write(part.main_grad, part.weight.writes, part.number, a, b)
    # Autograd never gets main_grad or a view of it, for it may keep what it gets as .grad and add to it: so None,
    # or for a weight with FLAG a dummy of its own, so that hooks run.
    if part.main_grad is None or not hasattr(part.weight, FLAG):
        return None
    setattr(part.weight, FLAG, True)
    return torch.zeros_like(part.matrix)

def versions_of(*factors: Tensor | None):
    return [x._version for x in factors if x is not None]                     # each change in place counts one more

@torch.no_grad()
def flush(delayed: list):
    """Compute the delayed gradients into main_grad or else into .grad. Raises RunError if a factor has changed."""
    for part, a, b, versions in delayed:
        need(versions == versions_of(a, b), f"a delayed gradient of a weight {tuple(part.matrix.shape)}",
             "an input or a gradient of the product that was changed in place after its backward",
             "the values that the backward had", "flush before the change, or change a copy", RunError)
    for part, a, b, _ in delayed:
        wgrad = accumulate_wgrad(part._replace(delayed=None), a, b)
        if part.main_grad is None:
            part.matrix.grad = wgrad if part.matrix.grad is None else part.matrix.grad + wgrad
    delayed.clear()

class LinearFunction(torch.autograd.Function):
    """x (scale matrix)^T; scale () or None is learnt too, and the matrix's gradient goes where its part says."""
    @staticmethod
    def forward(ctx, x, scale, matrix, part):
        ctx.save_for_backward(x, scale, matrix)
        ctx.part = part
        return F.linear(x, matrix if scale is None else scale * matrix)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        x, scale, matrix = ctx.saved_tensors
        weight = matrix if scale is None else scale * matrix
        grad_x = grad @ weight
        a, b = grad.flatten(0, -2), x.flatten(0, -2)
        grad_scale = None
        if scale is not None:
            # A product rounded to bf16 would waste an f32 main_grad: the scratch is as wide as that.
            main_grad = ctx.part.main_grad
            dtype = a.dtype if main_grad is None else torch.promote_types(a.dtype, main_grad.dtype)
            if a.is_cuda and a.dtype != dtype:
                product = torch.mm(a.t(), b, out_dtype=dtype)
            else:
                product = a.t().to(dtype) @ b.to(dtype)
            grad_scale = (product * matrix).sum()
            a, b = scale * product, None
        return grad_x, grad_scale, accumulate_wgrad(ctx.part, a, b), None

def linear(x, part: WeightPart, scale: Tensor | None = None):
    """x (scale matrix)^T, (..., C) -> (..., R)."""
    return LinearFunction.apply(x, scale, part.matrix, part)


# ---- relu^2 MLP: forward keeps only the squares between its products; backward takes max(pre, 0) as their root.
# By compute capability: a tile whose sums fit in registers, and num_stages of (forward, backward): as many as fit in
# shared memory, where backward needs room for squares.
LARGE_TILE = dict(ROWS=128, COLUMNS=256, DEPTH=64, num_warps=8), (4, 3)
RELU_SQ_TILES = {(8, 0): (dict(LARGE_TILE[0], COLUMNS=128), (3, 3)), (9, 0): LARGE_TILE, (10, 0): LARGE_TILE}
DESCRIBED_BYTES = 16                     # descriptors want lines of a multiple of this

def relu_sq_kernel(x, w, squares, out, count, columns, depth, BACKWARD: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """out = max(x w^T, 0)^2; BACKWARD: 2 (x w^T) sqrt(squares), for x a gradient and squares what forward returned.
    x (count, depth), w (columns, depth), out and squares (count, columns)."""
    # Each program takes many tiles, and loads for the next one while it stores. It stores a tile in two halves, which
    # leaves more shared memory to the loads. Descriptors address in 64 bits; beyond the edges they read 0.
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
            product = tl.dot(x_lines.load([row, at]), w_lines.load([column, at]).T, product)
        halves = tl.split(product.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        for half in tl.static_range(2):
            left = column + half * HALF
            if BACKWARD:
                result = 2 * halves[half] * tl.sqrt(squares_lines.load([row, left]).to(tl.float32))
            else:
                positive = tl.maximum(halves[half], 0)
                result = positive * positive
            out_lines.store([row, left], result.to(out_lines.dtype))

@torch.library.custom_op("train_gpt::relu_sq", mutates_args=())
def relu_sq(x: Tensor, w: Tensor, squares: Tensor | None) -> Tensor:
    """Launch relu_sq_kernel: max(x w^T, 0)^2, (N, F), or with squares its BACKWARD. x (N, K), w (F, K)."""
    triton = importlib.import_module("triton")
    device = x.device
    card = torch.cuda.get_device_properties(device)
    tile, stages = RELU_SQ_TILES[card.major, card.minor]
    count, depth = x.shape
    columns = len(w)
    out = x.new_empty(count, columns)
    backward = squares is not None
    read = squares.contiguous() if backward else out                          # forward reads none

    # Capture device, not x: Triton keeps the allocator, which would keep x alive. It is one for each thread, and
    # autograd has a thread of its own.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    tiles = triton.cdiv(count, tile["ROWS"]) * triton.cdiv(columns, tile["COLUMNS"])
    jitted(relu_sq_kernel)[(min(tiles, card.multi_processor_count),)](
        x.contiguous(), w.contiguous(), read, out, count, columns, depth, BACKWARD=backward,
        num_stages=stages[backward], **tile)
    return out

@relu_sq.register_fake
def _(x: Tensor, w: Tensor, _: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(w))

def fits_relu_sq(x, w):
    """True if relu_sq supports the device, dtype and shapes of x (N, K) and w (F, K)."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    described = all(length * x.element_size() % DESCRIBED_BYTES == 0 for length in (x.shape[1], len(w)))
    card = torch.cuda.get_device_properties(x.device)         # a constant in a compiled graph
    return described and (card.major, card.minor) in RELU_SQ_TILES

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
        ctx.parts = up, down
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

        up, down = ctx.parts
        grad_n = (grad_pre @ up_matrix).view_as(n)
        grad_up = accumulate_wgrad(up, grad_pre, n.flatten(0, -2))
        return grad_n, grad_up, accumulate_wgrad(down, squares, grad_y), None, None

def relu_sq_mlp(n, up: WeightPart, down: WeightPart):
    """max(n up^T, 0)^2 down. n (..., D), up and down (F, D) as stored (RECIPE 2.7)."""
    return ReluSqMLP.apply(n, up.matrix, down.matrix, up, down)


# ---- Head and loss
def row_chunks(logits, *arrays: Tensor):
    """Split arrays (N, ...), first the logits (N, V), by rows; into one chunk where a compiler fuses the passes."""
    rows = len(logits)
    if not logits.is_cuda and not torch.compiler.is_compiling():
        rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
    return zip(*(x.split(rows) for x in (logits, *arrays)))

def head_product(y, w, states, added):
    """Return y w + added[states]: y (N, D), w (D, C), states (N,) i32, added (STATES, C) -> (N, C)."""
    # One product of longer rows, so that nothing passes over (N, C) once more.
    y = torch.cat((y, F.one_hot(states.long(), STATES).type_as(y)), dim=1)
    return y @ torch.cat((w, added.type_as(w)))

def next_token_losses(y, w, targets, states, added):
    """Return -log softmax(y w + added[states])[target]. y (N, D), w (D, V), targets (N,) -> (N,) f32 or f64."""
    losses = []
    for logits, ids in row_chunks(head_product(y, w, states, added), targets[:, None]):
        z = logits.to(accum_dtype(y.dtype))
        losses.append(z.logsumexp(dim=-1) - z.gather(1, ids)[:, 0])
    return torch.cat(losses)

def mtp_targets(targets, weights):
    """(B, T), (G,) -> ids (N, G) i64 of the next G tokens and their weights (N, G), 0 beyond the slot's end."""
    slots, length = targets.shape
    position = torch.arange(length, device=targets.device)
    ahead = position[:, None] + torch.arange(len(weights), device=targets.device)         # (T, G)
    inside = ahead < length
    next_ids = targets[:, torch.where(inside, ahead, 0)]                      # (B, T, G)
    token_weights = (inside * weights).expand(slots, -1, -1)
    return next_ids.flatten(0, 1), token_weights.flatten(0, 1)

def losses_with_gradient(logits, ids, token_weights, grad, factor: float):
    """logits (N, V), ids and token_weights (N, G) -> sum over k of token_weights[k] * -log softmax(z)[ids[k]], (N,).
    Overwrites grad (N, V), which may be the logits, with factor * dloss/dlogits."""
    losses = []
    for block, block_ids, block_weights, out in row_chunks(logits, ids, token_weights, grad):
        log_probability = block.to(token_weights.dtype).log_softmax(dim=-1)
        nats = -log_probability.gather(1, block_ids)
        losses.append((block_weights * nats).sum(dim=1))
        scaled = factor * block_weights                                       # (N, G): no pass over (N, V) for it
        grad_z = log_probability.exp_().mul_(scaled.sum(dim=1, keepdim=True))
        for column, weight in zip(block_ids.split(1, dim=1), scaled.split(1, dim=1)):
            grad_z.scatter_add_(1, column, -weight)                           # one by one: a row may have an id twice
        out.copy_(grad_z)
    return torch.cat(losses)

def e4m3(x, scale: float):
    """x / scale, divided in f32 and rounded once; beyond the range it saturates on every version and device."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

def fp8_product(a, b, scale, native: bool, out_dtype: torch.dtype,
                fast: bool = False):
    """a @ b * scale of fp8 matrices, scale () f64. native: the device's product, fast: with a shorter accumulator."""
    # Without such a device the product is one of numbers in out_dtype, which holds fp8 exactly.
    if not native:
        return a.to(out_dtype) @ b.to(out_dtype) * scale.to(out_dtype)
    b = b.t().contiguous().t()                                                # in columns, as the device wants it
    by_tensor = F.ScalingType.TensorWise
    return F.scaled_mm(a, b, scale.float(), by_tensor, torch.ones((), device=a.device), by_tensor,
                       output_dtype=out_dtype, use_fast_accum=fast)

class HeadLoss(torch.autograd.Function):
    """Softcapped cross-entropy of the next G tokens, with the head's product inside (RECIPE 2.8).
    y (N, D), w (D, V), targets (B, T) i64 with B * T = N, weights (G,). Returns each position's loss, (N,) f32 or f64:
        sum over k < G with t + k < T of weights[k] * (lse_t - z_t[targets[t + k]]),  z = 23 sigmoid((y w + 5) / 7.5).
    Targets cross documents and stop at the slot's end; all V columns are in the softmax. With precision "fp8" or
    "emulated", y and w are e4m3 and the gradient of the logits is e5m2 under the scale loss_weight * 0.75 / 448, where
    loss_weight () is the seed of the backward. part: where w's gradient goes."""
    @staticmethod
    def forward(ctx, y, w, targets, weights, loss_weight, precision, logits_dtype, part, states,
                classes, added):
        ctx.part = part
        ctx.precision = precision
        ctx.vocab = w.shape[1]
        accum = accum_dtype(y.dtype)
        if classes is not None:
            w = w[:, classes]
        # The gradient of the logits is made here, for backward: in their memory, or in fp8 in half as many bytes.
        if precision == "plain":
            logits = grad = head_product(y, w, states, added)
            factor = 1.0
        else:
            native = precision == "fp8"
            product_dtype = logits_dtype if native else accum
            scale = torch.full((), FP8_Y_SCALE * FP8_W_SCALE, dtype=torch.float64, device=y.device)
            y = e4m3(y, FP8_Y_SCALE)
            w = e4m3(w, FP8_W_SCALE)
            logits = fp8_product(y, w, scale, native, product_dtype, fast=True).to(logits_dtype)
            grad = torch.empty_like(logits, dtype=torch.float8_e5m2)
            factor = 1 / FP8_GRAD_SCALE

        next_ids, token_weights = mtp_targets(targets, weights.to(accum))
        losses = losses_with_gradient(logits, next_ids, token_weights, grad, factor)
        ctx.save_for_backward(y, w, grad, loss_weight, classes)
        return losses

    @staticmethod
    @first_order
    def backward(ctx, grad_losses):
        y, w, grad, loss_weight, classes = ctx.saved_tensors
        if ctx.precision == "plain":
            factor = grad_losses.to(y.dtype)[:, None]                         # each position's own
            grad_y = factor * (grad @ w.t())
            if classes is None:
                return grad_y, accumulate_wgrad(ctx.part, factor * y, grad), *[None] * 9
            product = (factor * y).t() @ grad                                 # of the chosen columns; the others get 0
            whole = product.new_zeros(len(product), ctx.vocab).index_copy(1, classes, product)
            return grad_y, accumulate_wgrad(ctx.part, whole, None), *[None] * 9

        # The seed of the backward, loss_weight, moves the scale, never the payload; 0 makes gradients of 0, not 0 / 0.
        # Any other factor of a position (the trainer has none) is in the payload for w's gradient, and exact for y's.
        factor = torch.where(loss_weight == 0, 0, grad_losses / loss_weight)[:, None]
        scale = loss_weight.double() * FP8_GRAD_SCALE
        native = ctx.precision == "fp8"
        dtype_y = torch.bfloat16 if native else factor.dtype
        grad_y = factor.to(dtype_y) * fp8_product(grad, w.t(), scale * FP8_W_SCALE, native, dtype_y)
        payload = (factor * grad.to(factor.dtype)).to(grad.dtype)             # part of the copy into columns
        product = fp8_product(y.t().contiguous(), payload, scale * FP8_Y_SCALE, native, factor.dtype)
        grad_w = accumulate_wgrad(ctx.part, product, None)                    # scaled_mm cannot add to main_grad
        return grad_y, grad_w, *[None] * 9


# ---- Rows of tables
def sign_vectors(width: int):
    """(SIGN_VECTORS + 1, width) of +1 and -1, drawn from a constant seed, alike for all tables; +1 in the last."""
    drawn = torch.randint(2, (SIGN_VECTORS, width), generator=torch.Generator().manual_seed(SIGN_SEED))
    return torch.cat((2 * drawn - 1, torch.ones(1, width, dtype=drawn.dtype)))

def add_rows_kernel(row_grads, rows, order, grad, count, width, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """row_grads[rows[i]] += grad[order[i]] for each i < count; rows ascend, so that those of one row are neighbours."""
    # There is a program for each i. That of a row's first line adds all lines of the row, LINES at a time; the others
    # end at once.
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
            wanted = same[:, None] & inside[None, :]
            part = tl.load(grad + start[:, None] + column[None, :], mask=wanted, other=0)
            total += tl.sum(part.to(total.dtype), axis=0)
            at = at + LINES
            more = tl.min(same.to(tl.int32), axis=0)                          # all of them: the row may go on
        tl.store(target, total, mask=inside)

def add_rows(row_grads: Tensor, index: Tensor, grad: Tensor) -> None:
    """row_grads[index[i]] += grad[i] in a fixed order; row_grads (P, D) f32 or f64, index (...), grad (..., D)."""
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

add_rows_op = torch.library.custom_op("train_gpt::add_rows", add_rows, mutates_args=("row_grads",))       # for graphs

class RowLookup(torch.autograd.Function):
    """source[index]. Its gradient adds up in row_grads; autograd gets None, and no dense gradient exists."""
    @staticmethod
    def forward(ctx, source, index, row_grads):
        ctx.save_for_backward(index)
        ctx.row_grads = row_grads
        return F.embedding(index, source)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        add = add_rows_op if torch.compiler.is_compiling() else add_rows
        add(ctx.row_grads, index, grad)
        return None, None, None


# ====== Room 5: Model =================================================================================================
class Parameter(NamedTuple):
    """One row of the parameter table: all about a parameter but its place in the forward pass."""
    label: str
    shape: tuple[int, ...]
    init: tuple[str, Any]                # distribution and its number, as initial_values draws it
    optimizer: str = "adam"              # "normuon" for banks of matrices, or "rowwise": room 6 keeps its rows
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    betas: tuple = (0.9, 0.99)
    full_precision: bool = False         # f32 where the weights are bf16
    # A parameter with one of these two is owned in shards; every rank updates all others alike.
    parts: tuple[int, ...] = ()          # heights of a layer's matrices in its main_grad; (): autograd's gradient
    rows: Table | None = None            # of an embedding whose rows travel one by one

SCALARS = {                              # name -> initial value of each of the packed scalars (RECIPE 2.6)
    "residual": (1.1,) * len(LAYERS),
    "attention": (0.5, 1.0) * len(LAYERS),                                    # of q, k, v and of the output
    "bigram": (0.1,) * len(LAYERS),
    "smear": (0.0,),
    "skip": (-1.5,),
    # By kind of a position's candidates: what the output gets of the first one and of the second one.
    "first_copy": (0.0,) + (1.0, 1.0, 1.0) * len(COPY_NGRAMS),
    "second_copy": (0.0,) + (0.0, 0.0, 1.0) * len(COPY_NGRAMS),
}
NGRAM_MIX = 0.1                          # initial share of a table of n-grams in the residual stream of each layer
MLP_FACTOR = 4                           # F / D
UP_AND_DOWN = 2                          # matrices of one MLP
QKVO = 4                                 # matrices of one attention layer, below each other
QKV = 3                                  # of them, those before the attention

def initial_values(row: Parameter, generator: torch.Generator):
    """Draw a parameter's initial values, f32 in logical order."""
    kind, number = row.init
    shape = row.shape
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

def scalar_values(cfg: Config):
    """Return initial values of the packed scalars by name: recipe A's, then tables that enter the residual stream."""
    return SCALARS | {ngram.label: (NGRAM_MIX,) * len(LAYERS) for ngram in cfg.tables if ngram.place is None}

def parameter_table(cfg: Config) -> tuple[Parameter, ...]:
    """Return all parameters, tables included: shapes, initial values, optimizers, multipliers (RECIPE 2.1, 2.6)."""
    D, H, V = cfg.model_dim, cfg.num_heads, cfg.padded_vocab
    L, A, inside = len(LAYERS), len(ATTENTION_LAYERS), MLP_FACTOR * D
    value_gates = NUM_VALUE_TABLES + sum(ngram.place is not None for ngram in cfg.tables)
    bigrams, values, embed, *ngram_rows = row_tables(cfg)
    scalars = sum(scalar_values(cfg).values(), ())

    # What several rows of the table have in common.
    zeros = "constant", 0.0
    bound = 3**0.5 * 0.5 * D**-0.5                                            # a standard deviation of 0.5 / sqrt(D)
    exact = dict(lr_mul=5, wd_mul=0, full_precision=True)
    table = dict(lr_mul=75, wd_mul=5, betas=(0.75, 0.95))
    head = dict(wd_mul=150, betas=(0.5, 0.95))
    return (
        Parameter("attn", (A, QKVO * D, D), ("uniform", bound), "normuon", parts=(QKV * D, D)),
        Parameter("mlp", (L, UP_AND_DOWN, inside, D), ("up", bound), "normuon", parts=(inside, inside)),
        Parameter("scalars", (len(scalars),), ("constant", scalars), **exact),
        Parameter("x0_lambdas", (L,), zeros, **exact, betas=(0.65, 0.95)),
        Parameter("smear_gate", (1, GATE_INPUTS), zeros, lr_mul=0.01, wd_mul=0),
        Parameter("skip_gate", (1, GATE_INPUTS), zeros, lr_mul=0.05, wd_mul=0),
        Parameter("attn_gate_bank", (A, H, GATE_INPUTS), zeros),
        Parameter("ve_gate_bank", (value_gates, H, GATE_INPUTS), zeros),
        Parameter("bigram_embed", (bigrams.rows, D), zeros, **table, rows=bigrams),
        Parameter("value_embed", (values.rows, D), ("normal", 0.01), **table, rows=values),
        Parameter("lm_head", (D, V), ("normal", 0.005), **head, parts=(D,)),
        Parameter("embed", (embed.rows, D), zeros, **head, rows=embed),       # lm_head^T while they are tied
        # The row-wise rule has no first moment.
        *(Parameter(ngram.label, (ngram.rows, D), zeros, "rowwise", ngram.lr_mul, ngram.wd_mul, (0.0, ngram.beta2),
                    rows=rows) for ngram, rows in zip(cfg.tables, ngram_rows)))

AttentionSpans = dict[tuple[str, str], AttentionSpan]                         # by attention and window of a layer

def spans_of(short: int, long: int, max_len: int, scale: float):
    """Return the span of every kind of layer. Windows in positions; max_len in tokens: 2 positions in paired layers."""
    return {(attention, name): AttentionSpan(per_token * max_len, window, scale)
            for attention, per_token in (("plain", 1), ("paired", 2))
            for name, window in (("short", short), ("long", long))}

class GPT(nn.Module):
    """The model of RECIPE 2. Knows shapes, not ranks. Parameters carry the labels of the parameter table."""
    def __init__(self, cfg: Config, attention: Callable, rotary_len: int, shard_rows: dict):
        """rotary_len: the longest slot in tokens. shard_rows: rows that this rank keeps, by label of a table."""
        super().__init__()
        self.heads = cfg.num_heads
        self.head_dim = cfg.head_dim
        self.attention = attention
        # Rows of row-wise tables are no parameters: room 6 keeps them and hands them to `losses` as row buffers.
        self.table = {row.label: row for row in parameter_table(cfg) if row.optimizer != "rowwise"}
        self.scalar_sizes = {name: len(values) for name, values in scalar_values(cfg).items()}
        self.ngrams = cfg.tables
        dtype = getattr(torch, cfg.dtype)
        for label, row in self.table.items():
            rows, *rest = row.shape
            row_dtype = accum_dtype(dtype) if row.full_precision else dtype
            weight = torch.empty((shard_rows.get(label, rows), *rest), dtype=row_dtype)
            self.register_parameter(label, nn.Parameter(weight))

        # Buffers follow from settings and schedule: no checkpoint needs them.
        if any(ngram.signs for ngram in self.ngrams):
            self.register_buffer("sign_vectors", sign_vectors(cfg.model_dim).to(dtype), persistent=False)
        self.register_buffer("possible", read_grammar(cfg).logits().to(dtype), persistent=False)
        for name in ("rotary_cos", "rotary_sin"):                             # paired layers have 2T positions
            self.register_buffer(name, torch.zeros(2 * rotary_len, cfg.head_dim, dtype=dtype), persistent=False)
        self.turning = {}                                     # frequencies -> angle per position of each channel

    @torch.no_grad()
    def set_initial_values(self, seed: int, shard: Callable):
        """Draw all parameters. shard: (label, whole parameter) -> the part that is here."""
        for label, row in self.table.items():
            # Each label has a generator of its own, so that a parameter more or less changes no other.
            digest = hashlib.sha256(f"{seed}/{label}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            drawn = shard(label, initial_values(row, generator))
            if not row.full_precision:
                drawn = drawn.bfloat16()                                      # the same numbers in any dtype
            self.get_parameter(label).copy_(drawn)
        self.embed.copy_(shard("embed", self.lm_head.t()))

    def set_rotary(self, frequencies: tuple):
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
               row_buffers: dict):
        """Return losses (B, T); weights (G,) of the next tokens; loss_weight () is the seed backward gets."""
        y = self.hidden(batch, spans, row_buffers).flatten(0, 1)
        logits_dtype = torch.float64 if y.dtype == torch.float64 else torch.bfloat16       # of an fp8 head
        classes, added = None, self.possible
        if batch.classes is not None:
            classes = batch.classes[0]
            added = added[:, classes] + batch.class_logits[0]
        return HeadLoss.apply(y, self.lm_head, batch.targets, weights, loss_weight, precision, logits_dtype,
                              as_part(self.lm_head), batch.states.flatten(), classes, added).view_as(batch.targets)

    def hidden(self, batch: Batch, spans: AttentionSpans, row_buffers: dict):
        """Return the normalised stream that enters the head, (B, T, D).
        row_buffers: label of a table -> (rows to read, f32 or f64 sums of their gradients or None)"""
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

        x0, streams, values, candidates = self.inputs(batch, scalars, row_buffers)
        x = x0
        kept = {}                                # name -> stream after the layer that keeps it
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

        # The head's columns are the embeddings, so adding a token's embedding raises its own logit.
        y = rms_norm(x)
        if not candidates:
            return y
        shares = torch.stack((scalars["first_copy"], scalars["second_copy"]), dim=-1).type_as(y)
        share_of = F.one_hot(batch.signs["copy_embed"].long(), len(shares)).type_as(y) @ shares       # (B, T, 2)
        for share, rows in zip(share_of.unbind(-1), candidates):
            y = y + share[..., None] * rms_norm(rows)
        return y

    def inputs(self, batch: Batch, scalars: dict, row_buffers: dict):
        """Read the tables. Returns all that enters the layers, rows (B, T, D) each:
        x0       the normalised embedding, where the residual stream begins
        streams  (share by layer, rows) of what every layer mixes in: bigrams, then tables of n-grams
        values   depth -> [(number of the gate, rows)] of what joins the attention values of a layer
        candidates  embeddings of the first and of the second candidate of each position"""
        # Each token's embedding gets a gated share of the one before it in the slot, over documents.
        e, *candidates = self.rows_of("embed", batch, row_buffers)
        gate = scalars["smear"].type_as(e) * gate_of(e[:, 1:, :GATE_INPUTS], self.smear_gate)
        smeared = torch.cat((e[:, :1], e[:, 1:] + gate * e[:, :-1]), dim=1)
        x0 = rms_norm(smeared)
        streams = [(scalars["bigram"].unbind(), *self.rows_of("bigram_embed", batch, row_buffers))]
        value_rows = self.rows_of("value_embed", batch, row_buffers)
        values = {}
        for depth, layer in enumerate(LAYERS):
            if layer.value is not None:
                values[depth] = [(layer.value, value_rows[layer.value])]

        # Gates of n-gram tables come after those of the value tables, in the order of the tables.
        gate_number = NUM_VALUE_TABLES
        for ngram in self.ngrams:
            rows, = self.rows_of(ngram.label, batch, row_buffers)
            if ngram.signs:
                rows = rows * F.embedding(batch.signs[ngram.label], self.sign_vectors)
            if ngram.place is None:
                streams.append((scalars[ngram.label].unbind(), rows))
            else:
                values.setdefault(ngram.place, []).append((gate_number, rows))
                gate_number += 1
        return x0, streams, values, candidates

    def rows_of(self, label: str, batch: Batch, row_buffers: dict):
        """Return rows of a table by the batch's index (B, T) or (B, reads, T): one (B, T, D) per read."""
        index = batch.rows[label]
        rows, row_grads = row_buffers[label]
        # A lookup for each read: its gradient goes to the row gradients as it comes up, and is stacked with no other.
        planes = index.unbind(1) if index.dim() == 3 else [index]
        return [RowLookup.apply(rows, plane, row_grads) for plane in planes]

    def attend(self, layer: Layer, n: Tensor, qkv: Tensor, value_rows: list,
               cu_seqlens: Tensor, span: AttentionSpan):
        """Do one layer's attention, up to its gate and output matrix: qkv (B, T, 3D) of n (B, T, D) -> (B, T, H, E).
        value_rows: (number of the gate, rows (B, T, D)) that join the values. Angles are of positions in the slot."""
        slots, length, _ = n.shape
        q, k, v = qkv.view(slots, length, QKV, self.heads, self.head_dim).unbind(2)
        q = rms_norm(q)
        k = rms_norm(k)
        # A gate from 0 to 2 for each head's rows. Plain layers look at the row too, paired ones do not.
        for number, rows in value_rows:
            features = n[..., :GATE_INPUTS]
            if layer.attention == "plain":
                half = GATE_INPUTS // 2
                features = torch.cat((n[..., :half], rows[..., :half]), dim=-1)
            gate = 2 * gate_of(features, self.ve_gate_bank[number])
            v = v + gate[..., None] * rows.view(v.shape)

        # Paired layers put heads j and j + H/2 of token t at 2t and 2t + 1 of one sequence. The angles follow another
        # pairing, even heads at 2t and odd heads at 2t + 1: the peer assigns them before it regroups, and its published
        # losses contain that (RECIPE 2.4).
        per_token = 1                                                         # positions
        if layer.attention == "paired":
            per_token = 2
            cu_seqlens = 2 * cu_seqlens
        cos = self.rotary_cos[:per_token * length].view(length, 1, per_token, -1)          # alike for all heads
        sin = self.rotary_sin[:per_token * length].view(length, 1, per_token, -1)
        by_position = (slots, length, self.heads // per_token, per_token, self.head_dim)
        q = rotate(q.view(by_position), cos, sin)
        k = rotate(k.view(by_position), cos, sin)
        # The half of a key that does not rotate is that of the token before, in its document or not.
        if layer.key_shift:
            turning, still = k.chunk(2, dim=-1)
            shifted = torch.cat((still[:, :1], still[:, :-1]), dim=1)         # a slot's first token keeps its own
            k = torch.cat((turning, shifted), dim=-1)
        flat = [x.reshape(-1, self.heads // per_token, self.head_dim) for x in (q, k, v)]
        return self.attention(*flat, cu_seqlens, span).view(v.shape)

def gate_of(features: Tensor, weight: Tensor):
    """Return shares between 0 and 1: features (..., GATE_INPUTS), weight (heads, GATE_INPUTS) -> (..., heads)."""
    return torch.sigmoid(F.linear(features, weight))


# ====== Room 6: Rows ==================================================================================================
# Each rank owns a shard of every table and reads rows of all shards. A plan's lists serve both directions: rows travel
# from owner to reader before a cycle, their gradients from reader to owner after it.
Wait = Callable[[], object]              # returns when what was launched is complete

def do_nothing(**_):
    """Stand for a wait, report, restore or plans_ahead where there is none."""

def exchange_plans(fabric: Fabric, group, dtype: str, plans: dict[str, TablePlan]):
    """Tell every owner which of its rows this rank reads, and put into the plans what ranks request of this one.
    group: gloo's; None: the group of all ranks. Raises RunError where ranks disagree."""
    # By table and owner: the places that this rank reads in the owner's shard; of a tied table none.
    W, me = fabric.world, fabric.rank
    lists, counts, common = [], [], []
    for label, plan in plans.items():
        counts.append([0] * W if plan.tied else plan.send_counts)
        places = plan.my_rows[:sum(counts[-1])] % plan.shard_size
        lists.append(places.int().split(counts[-1]))
        common.append(dict(plan.tag, table=label, dtype=dtype, tied=plan.tied))

    # First what must be equal everywhere, or lists of different cycles would be taken for each other.
    everyone = [None] * W
    dist.all_gather_object(everyone, (common, counts), group=group)
    for reader, (theirs, _) in enumerate(everyone):
        for found, expected in zip(theirs, common):
            need(found == expected, f"row plans of ranks {reader} and {me}", found, expected, "use the same flags",
                 RunError)

    # Then all lists in one message, owner by owner. They arrive reader by reader, and table by table from each.
    leaving = torch.cat([of_table[owner] for owner in range(W) for of_table in lists])
    requests = np.array([of_reader for _, of_reader in everyone])[:, :, me]            # how many, (reader, table)
    arriving = torch.empty(requests.sum(), dtype=torch.int32)
    dist.all_to_all_single(arriving, leaving, requests.sum(1).tolist(), np.sum(counts, 0).tolist(), group=group)
    pieces = arriving.split(requests.flatten().tolist())

    # A list that no plan can hold would read and change other rows in silence.
    for table, (label, plan) in enumerate(plans.items()):
        requested = pieces[table::len(plans)]
        for reader, places in enumerate(requested):
            ascending = np.diff(places, prepend=-1, append=plan.shard_size).min() > 0
            need(ascending, f"rows of {label} that rank {reader} requests", places,
                 f"ascending places below {plan.shard_size}", "report it", RunError)
        plan.requested_rows = fabric.host_tensor(torch.cat(requested).long())
        plan.recv_counts = requests[:, table].tolist()
        plan.count_bytes(me, counts[table], plan.recv_counts, arriving.element_size())

class RowTable:
    """One table on one rank: the shard that the rank owns, a cache of the rows that it reads, and gradients of both."""
    # Cache and row_grads hold the rows of one plan, in the order of its list. The shard of a dense-Adam table is a
    # parameter, all of which is updated; that of a row-wise table is in a home, from which an update takes the
    # requested rows and where it puts them back.
    def __init__(self, table: Table, cfg: Config, fabric: Fabric, shard: Tensor | None, most_tokens: int,
                 report: Callable, head: Tensor | None = None):
        """shard (C, D): the parameter; None for a row-wise table. most_tokens: the most that a rank reads a cycle."""
        self.head = head                                                      # (D, V): rows of `embed`, while tied
        self.table = table
        self.fabric = fabric
        self.report = report                                                  # called with what each plan has moved
        self.debug = cfg.debug_rows
        self.home = self.grad = None
        if table.is_rowwise:
            self.mode = "sparse"
            self.home = HOMES[table.home](table, cfg, fabric)
            self.shard = self.home.stored.rows
        else:
            self.mode = cfg.row_comms                                         # dense: a plan lists all rows
            self.shard = shard.detach()
            self.grad = torch.zeros_like(self.shard, dtype=accum_dtype(shard.dtype))   # of the shard, summed over ranks

        # Buffers are as large as the largest cycle needs and never grow, so that addresses and shapes stay.
        self.alone = fabric.world == 1 and self.home is None                  # lookups read the shard itself
        if self.alone:
            self.cache = shard
            self.row_grads = self.grad
        else:
            size, width = self.shard.shape
            rows = fabric.world * size
            if self.mode == "sparse":
                rows = min(rows, most_tokens * table.reads)
            self.cache = self.shard.new_zeros(rows, width, device=fabric.device).requires_grad_()
            self.row_grads = torch.zeros_like(self.cache, dtype=accum_dtype(self.shard.dtype), requires_grad=False)
        self.arrival = do_nothing                                             # of the rows that are on their way
        self.reset()

    def reset(self):
        """Drop all but the rows at home: cache, gradients, counts, prepared updates."""
        self._await_rows()
        self.cached = None                                                    # the plan whose rows are in the cache
        self.live = None                                                      # rows that the next update changes
        self.pending = []                                                     # plans with gradients in row_grads
        self.totals = Counter(bytes_sent=0, bytes_received=0, bytes_dense=0)
        self.row_grads.zero_()
        if self.home is None:
            self.grad.zero_()
        else:
            self.home.invalidate()

    def prepare(self, plan: TablePlan):
        """Make a row-wise table's next update, a cycle ahead, and let its rows leave a host home."""
        if self.home is not None:
            plan.update = self.home.prepare(plan.requested_rows.numpy())

    @torch.no_grad()
    def fetch(self, plan: TablePlan):
        """Launch the plan's rows into the cache: after the owners' update, never before."""
        self._await_rows()
        if plan.update is None:
            self.prepare(plan)                                                # no loader has done it
        plan.change_lists(self._on_device)
        self.cached = plan
        rows, places = self.shard, plan.requested_rows
        if self.home is not None:
            self.live = self.home.take(plan.update)
            rows, places = self.live.rows, self._on_device(plan.update.inverse)
        if not self.alone:
            self.arrival = self._bring(plan, self.cache.detach(), rows, places)

    def rows_for_forward(self, plan: TablePlan):
        """Return the cache with the plan's rows, and row_grads. Raises RunError if they are of another plan."""
        # Unless a rank is alone, row_grads are of one plan, whose list says where they go.
        if plan not in self.pending:
            need(self.alone or not self.pending, f"gradients of {self.table.label}",
                 f"of {[other.tag for other in self.pending]}, now {plan.tag}", "batches of one cycle",
                 "optim_step on its last step first", RunError)
            self.pending.append(plan)
        if self.cached is not plan:
            self.fetch(plan)
        self._await_rows()
        return self.cache, self.row_grads

    def read(self, plan: TablePlan):
        """Return the plan's rows in a new tensor, or the shard if the rank is alone, and None for the row_grads."""
        plan.change_lists(self._on_device)
        out = self.shard
        if not self.alone:
            rows, places = self.shard, plan.requested_rows
            if self.home is not None:
                rows, places = self.home.read(places), None
            out = self.cache.new_empty(len(plan.my_rows), self.cache.shape[1])
            self._bring(plan, out, rows, places)()
        self.report_traffic(plan)
        return out, None

    def return_gradients(self):
        """Launch row_grads to the owners of the rows. Returns a gradient and the wait after which it is complete.
        The gradient is of the shard, (C, D), or of the rows of a row-wise update, (u, D)."""
        if self.alone:
            return self.grad, do_nothing
        # They travel in the type of the weights, and are added in that of row_grads.
        plan, = self.pending
        rows = self.row_grads[:len(plan.my_rows)].to(self.cache.dtype)
        arrived = rows.new_empty(len(plan.requested_rows), rows.shape[1])
        wait = self._launch(plan, arrived, rows, plan.recv_counts, plan.send_counts)
        grad, places = self.grad, plan.requested_rows
        if self.home is not None:
            grad = torch.zeros_like(self.live.rows, dtype=self.row_grads.dtype)
            places = self._on_device(plan.update.inverse)

        def add_in_rank_order():
            wait()
            add_rows(grad, places, arrived)                                   # reader by reader

        return grad, add_in_rank_order

    def add_to_head(self, head_grad: Tensor):
        """Move row_grads to the gradient of the head, (D, V), while head and embedding are tied; drop the plans."""
        for plan in self.pending:
            at = self._in_row_grads(plan)
            head_grad[:, plan.head_columns] += self.row_grads[at].t().to(head_grad.dtype)
            self.row_grads[at] = 0                                            # a row in two of the plans counts once
        self.clear()

    def put_back(self):
        """Put the rows that a row-wise update has changed back into their home."""
        plan, = self.pending
        self.home.put(plan.update, self.live)

    def clear(self):
        """Drop the gradients of the pending plans, and what is cached."""
        # Only the rows of the plans: the rest of the buffers is zero already.
        for plan in self.pending:
            self.row_grads[self._in_row_grads(plan)] = 0
            if self.home is None and not self.alone and not plan.tied:
                self.grad[plan.requested_rows] = 0
            self.report_traffic(plan)
        self.pending = []
        self.cached = self.live = None                                        # makes room for those of the next update
        if self.debug:
            buffers = [self.row_grads] if self.grad is None else [self.row_grads, self.grad]
            need(not any(x.any() for x in buffers), f"gradients of {self.table.label}", "some in rows of no plan",
                 "none", "report it", RunError)

    def report_traffic(self, plan: TablePlan):
        """Report what a plan has moved; bytes_dense: what dense mode would have moved for an update."""
        # Nothing travels while tied, and nobody asks about warm-up and samples.
        purpose = plan.tag["purpose"]
        if plan.tied or purpose not in ("train", "validation"):
            return
        moved = dict(bytes_sent=plan.sent, bytes_received=plan.received, bytes_dense=0)
        if purpose == "train":
            moved["bytes_dense"] = 2 * (self.fabric.world - 1) * self.shard.nbytes       # rows out, gradients back
            if self.home is not None:
                moved |= self.home.traffic
                self.home.traffic = dict.fromkeys(self.home.traffic, 0)
            self.totals.update(moved)
        self.report(**plan.tag, table=self.table.label, mode=self.mode, rows=len(plan.my_rows), reads=plan.reads,
                    **moved, plan_ms=round(plan.plan_ms, 3))

    def _on_device(self, rows: Tensor):
        return rows.to(self.fabric.device, non_blocking=True)

    def _in_row_grads(self, plan: TablePlan):
        return plan.my_rows if self.alone else slice(len(plan.my_rows))

    def _await_rows(self):
        self.arrival()
        self.arrival = do_nothing

    def _bring(self, plan: TablePlan, out: Tensor, rows: Tensor, places: Tensor | None):
        """Launch a plan's rows into `out`, and return the wait. This rank sends rows[places], or all rows for None."""
        if self.debug:
            out.fill_(math.nan)                                               # rows of no plan are not to be read
        arriving = out[:len(plan.my_rows)]
        if plan.tied:
            arriving.copy_(self.head.t()[plan.head_columns])                  # every rank has the head
            return do_nothing
        if places is not None:
            rows = rows.index_select(0, places)
        return self._launch(plan, arriving, rows, plan.send_counts, plan.recv_counts)

    def _launch(self, plan: TablePlan, out: Tensor, rows: Tensor, recv_counts: list[int],
                send_counts: list[int]):
        """Launch the all-to-all of rows into `out`, and return the wait. Lists may be empty."""
        plan.count_bytes(self.fabric.rank, send_counts, recv_counts, rows.shape[1] * rows.element_size())
        if self.fabric.world == 1:
            out.copy_(rows)
            return do_nothing
        return dist.all_to_all_single(out, rows, recv_counts, send_counts, async_op=True).wait


# ---- Homes of row-wise tables: any number of rows, of which an update changes those that ranks request
class RowState(NamedTuple):
    """Rows of a shard with their optimizer state."""
    rows: Tensor                         # (n, D)
    v: Tensor                            # (n,) f32 or f64: second moment
    last: Tensor                         # (n,) i32: number of the update that changed the row last; 0: none

    def at(self, places: Tensor):
        places = places.to(self.rows.device, non_blocking=True)
        return RowState(*(x.index_select(0, places) for x in self))

    def put(self, places: Tensor, changed: RowState):
        places = places.to(self.rows.device, non_blocking=True)
        for x, new in zip(self, changed):
            x.index_copy_(0, places, new)

    def to(self, device: torch.device):
        return RowState(*(x.to(device, non_blocking=True) for x in self))

MAP_NORESERVE = 0x4000                   # of Linux on x86 and ARM; Python has the name since 3.13
PIECE_ROWS = 1 << 14                     # rows of a rank that are copied, sent to another rank or in a file together

def untouched_zeros(shape: tuple, dtype: torch.dtype):
    """Return zeros on the host that take memory page by page, when they are first written."""
    if sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    # Nothing is reserved, for a plain mapping of 38 GB is refused on a machine of 24. Pages are small ones, for a row
    # in a huge page would take 2 MB.
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    with contextlib.suppress(OSError):                                        # a system without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

class DeviceHome:
    """Rows and state of a shard on the device."""
    def __init__(self, table: Table, cfg: Config, fabric: Fabric):
        self.fabric = fabric
        self.device = fabric.device
        size = -(-table.rows // fabric.world)
        dtype = getattr(torch, cfg.dtype)
        zeros = untouched_zeros
        if fabric.on_cuda and table.home == "device":
            zeros = functools.partial(torch.zeros, device=fabric.device)
        self.stored = RowState(zeros((size, cfg.model_dim), dtype=dtype), zeros((size,), dtype=accum_dtype(dtype)),
                               zeros((size,), dtype=torch.int32))
        self.invalidate()

    def prepare(self, requested: np.ndarray):
        """Return the update of the next cycle; requested: places in the shard, reader by reader."""
        return row_update(requested, None, self.fabric)

    def take(self, update: RowUpdate):
        """Return the update's rows on the device, as the update before has left them."""
        return self.stored.at(update.places)

    def put(self, update: RowUpdate, changed: RowState):
        self.stored.put(update.places, changed)

    settle = staticmethod(do_nothing)    # waits for what `put` has begun: here nothing

    def read(self, places: Tensor):
        """Return rows on the device, as the last update has left them."""
        self.settle()
        rows = self.stored.rows
        return rows.index_select(0, places.to(rows.device)).to(self.device, non_blocking=True)

    def invalidate(self):
        """Forget prepared updates and their rows on the device: from here on the rows at home are right."""
        self.traffic = dict(bytes_up=0, bytes_down=0)                         # between host and device

    def touched_places(self):
        """Yield the places of all rows that an update has ever changed, ascending, in pieces (n,)."""
        self.settle()
        places = self.stored.last.nonzero().flatten()
        if len(places) > 0:
            yield from places.split(PIECE_ROWS)

    def touched(self):
        """Yield the same places with copies of their rows, on the host."""
        for places in self.touched_places():
            yield places.cpu(), RowState(*(x.cpu() for x in self.stored.at(places)))

    def load(self, pieces: Iterable):
        """Replace all rows by those of the pieces, as `touched` gave them, and zeros elsewhere."""
        # Rows that no update has changed are zeros that take no memory, and have to stay so.
        for places in self.touched_places():
            for x in self.stored:
                x.index_fill_(0, places, 0)
        for places, rows in pieces:
            self.stored.put(places, rows.to(self.stored.rows.device))
        self.invalidate()

class HostHome(DeviceHome):
    """Rows and state of a shard in pageable host memory; the rows of a cycle travel to the device and back."""
    # While a cycle runs, rows that only the next cycle requests come up, and rows of the last update go down; those
    # that both cycles request stay on the device. One thread does it all in the order of submission, so that no row
    # comes up before its last change has come down. Copies of a GPU have a stream of their own.
    def __init__(self, table: Table, cfg: Config, fabric: Fabric):
        # The mover waits for the GPU, and the GPU for other ranks, which may still compile.
        self.cfg = replace(cfg, comm_timeout=LONG_PATIENCE * cfg.comm_timeout)
        self.stream = torch.cuda.Stream(fabric.device) if fabric.on_cuda else None
        self.mover = ThreadPoolExecutor(1, "table-home", initializer=fabric.enter_thread)
        self.lock = threading.Lock()                          # prepare is called by the loader's thread
        self.writeback = None                                 # the mover's copy to the host of what was put last
        super().__init__(table, cfg, fabric)

    def invalidate(self):
        self.settle()
        super().invalidate()
        with self.lock:
            self.live = None                                  # rows of the update that was taken last, on the device
            self.taken = None                                 # that update
            self.prepared = []                                # updates to take, in this order
            self.prefetch = None                              # fresh rows of the first of them

    def prepare(self, requested: np.ndarray):
        with self.lock:
            before = (self.prepared or [self.taken])[-1]
        update = row_update(requested, before, self.fabric)
        with self.lock:
            self.prepared.append(update)
            if len(self.prepared) == 1:                       # else the one before it is not taken yet
                self._start_prefetch()
        return update

    def _start_prefetch(self):
        update = self.prepared[0]                             # the one before it is taken
        self.prefetch = self.mover.submit(self._bring_up, update.places[update.fresh])

    def take(self, update: RowUpdate):
        # Only the expected update finds its prefetched rows. After a reset none is: all its rows come up.
        with self.lock:
            expected = self.prepared[:1] == [update] and update.follows is self.taken
            coming = self.prefetch if expected else self.mover.submit(self._bring_up, update.places)
        live, copied = bounded(coming, self.cfg, "waiting for rows of a table from the host")
        self.traffic["bytes_up"] += sum(x.nbytes for x in live)
        if copied is not None:                                                # the GPU waits, this thread does not
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(copied)
            for x in live:
                x.record_stream(computing)

        # Rows that the last update also had are newer here than at home; they join those that came up.
        if expected and self.live is not None:
            fresh = live
            live = RowState(*(x.new_empty(len(update.places), *x.shape[1:]) for x in fresh))
            live.put(update.fresh, fresh)
            live.put(update.kept, self.live.at(update.kept_from))

        # From here on the loader's thread may start what comes next.
        with self.lock:
            self.live = live
            self.taken = update
            update.follows = None                             # else each update would keep all before it
            self.prepared = self.prepared[1:] if expected else []
            if self.prepared:
                self._start_prefetch()
        return live

    def put(self, update: RowUpdate, changed: RowState):
        """Begin to copy the changed rows to the host. Raises what went wrong with those of the update before."""
        self.settle()
        self.traffic["bytes_down"] += sum(x.nbytes for x in changed)
        computed = torch.cuda.current_stream(self.device).record_event() if self.stream else None
        self.writeback = self.mover.submit(self._bring_down, update.places, changed, computed)

    def settle(self):
        if self.writeback is not None:
            bounded(self.writeback, self.cfg, "waiting for rows of a table on their way to the host")
            self.writeback = None

    def _staging(self, count: int):
        return RowState(*(torch.empty(count, *x.shape[1:], dtype=x.dtype, pin_memory=True) for x in self.stored))

    def _bring_up(self, places: Tensor):
        """Copy rows to the device; runs on the mover. Returns them and the CUDA event after the copy."""
        if self.stream is None:
            return self.stored.at(places), None
        staging = self._staging(len(places))
        for x, out in zip(self.stored, staging):
            torch.index_select(x, 0, places, out=out)
        with torch.cuda.stream(self.stream):
            return staging.to(self.device), self.stream.record_event()

    def _bring_down(self, places: Tensor, changed: RowState, computed):
        """Store rows in host memory once the CUDA event `computed` is over; runs on the mover."""
        if computed is not None:
            staging = self._staging(len(places))
            self.stream.wait_event(computed)
            with torch.cuda.stream(self.stream):
                for x, out in zip(changed, staging):
                    out.copy_(x, non_blocking=True)
            self.stream.synchronize()
            changed = staging
        self.stored.put(places, changed)

HOMES = dict(device=DeviceHome, host=HostHome)


# ====== Room 7: Optimizer =============================================================================================
# Reductions are launched, and updates done, in an order of their own. NorMuon comes first, so that the gradients of
# Adam's entries travel while it computes. Tables of n-grams go before the last.
SMALL = "small"                          # what every rank updates alike: one sum over ranks for all of it
REDUCE_ORDER = ("attn", "mlp", "lm_head", "value_embed", "bigram_embed", "embed", SMALL)
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

def normuon_direction(grad, momentum, second, mu, beta2: float,
                      polar_dtype: torch.dtype):
    """Return orthogonalised Nesterov momentum, normalised per row at an unchanged Frobenius norm (arXiv 2510.05491).
    grad, momentum (M, r, c); second (M, r, 1), or (M, 1, c) of wide matrices. momentum and second change in place."""
    momentum.add_((grad - momentum) * (1 - mu))
    nesterov = grad * (1 - mu) + momentum * mu
    o = polar_express(nesterov.to(polar_dtype)).to(grad.dtype)

    # Divide each row, or column of a wide matrix, by the running root mean square of its updates.
    axis = -1 if second.shape[-1] == 1 else -2                                # the one that second lacks
    mean_square = o.square().mean(dim=axis, keepdim=True)                     # shaped like second
    second.lerp_(mean_square, 1 - beta2)
    scale = second.clamp_min(1e-10).rsqrt()

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

def normuon_update(p, mantissa: Tensor | None, grad, momentum, second,
                   grad_scale: float, mu, lr, lr_muls, decay, beta2: float):
    """Make one NorMuon step on matrices p (M, r, c), or on the upper halves of f32 weights with a mantissa, in place.
    grad (M, r, c) a plain sum over slots; lr_muls (M, 1, 1); lr (), decay () = weight decay x lr, cautious."""
    grad = grad.to(momentum.dtype) * grad_scale
    update = normuon_direction(grad, momentum, second, mu, beta2, p.dtype)
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

def rowwise_update(rows, v, last, grad, grad_scale: float, number,
                   beta2: float, eps: float, step_size, decay, bits: Tensor | None):
    """Make one update of the requested rows of a row-wise table in place: one second moment per row.
    rows (u, D), v (u,), last (u,) i32, grad (u, D) a plain sum over slots and ranks; number () of the update, from 1;
    step_size () = lr sqrt(1 - beta2^number), decay () = lr^2 x weight decay; bits (u,) i32: round bf16 rows by them."""
    grad = grad * grad_scale
    # v decays for all updates that a row missed, as if it had been in each; in f64, rounded once.
    missed = torch.pow(beta2, (number - last).double()).to(v.dtype)
    v.copy_(v * missed + (1 - beta2) * grad.square().mean(dim=1))
    last.copy_(number.expand_as(last))
    update = grad / (v.sqrt() + eps)[:, None] * step_size
    moved = cautious_adam(rows.to(grad.dtype), update, decay)
    if bits is not None:
        moved = stochastic_round(moved, bits)
    rows.copy_(moved)

def stochastic_round(x, bits):
    """Round f32 (u, D) to what bf16 holds: up with the probability that the cut bits say; bits (u,) i32."""
    # What an element draws follows from (seed, label, logical row, update, column) alone: ranks do not matter.
    column = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    drawn = lowbias32(bits[:, None] ^ column) & 0xFFFF
    rounded = (x.view(torch.int32) + drawn) & -0x10000
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)          # a carry makes -0.0 of the largest NaN

def row_bits(seed: int, label: str, rows, number):
    """Return the random bits of logical rows (u,) i64 in a table's update, (u,) i32; number () i32 of the update."""
    start = rows ^ zlib.crc32(f"{seed}/{label}".encode())
    return lowbias32(lowbias32(start.int()) ^ number)                         # the lower 32 bits of the i64

def lowbias32(x):
    """Hash i32 to i32 by the finaliser of that name (Chris Wellons), in arithmetic that wraps."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D                 # & : a shift of negative numbers copies the sign
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ (x >> 16 & 0xFFFF)

def cpu_scalar(value: float):
    """Return a number that changes every step as a tensor, so that compiled updates need no new graph."""
    return torch.tensor(value, dtype=torch.float64)

def initial_state(row: Parameter, shard):
    """Return the optimizer's state of a parameter or a shard of it: name -> zeros."""
    # The one place that lists it: snapshots, checkpoints and the memory estimate follow.
    shard = bank_matrices(row, shard)
    zeros = functools.partial(torch.zeros_like, dtype=accum_dtype(shard.dtype))
    if row.optimizer == "adam":
        return dict(m=zeros(shard), v=zeros(shard))
    # NorMuon takes means of squares along rows, or along columns of wide matrices: the smaller state.
    axis = -1 if shard.shape[-2] >= shard.shape[-1] else -2
    state = dict(momentum=zeros(shard), second=zeros(shard.narrow(axis, 0, 1)))
    if shard.dtype == torch.bfloat16:
        state["mantissa"] = torch.zeros_like(shard, dtype=torch.int16)
    return state

def bank_matrices(row: Parameter, weight):
    """View a NorMuon bank as its matrices (M, r, c), and any other weight as it is."""
    if row.optimizer != "normuon":
        return weight
    return weight.view(-1, math.gcd(*row.parts), row.shape[-1])               # q, k and v are one part of three


# ---- Entries of the orders: each reduces its gradient, updates what this rank owns, and gathers what others need.
class Small:
    """All parameters that every rank updates alike; one all-reduce sums their gradients."""
    def __init__(self, optimizer: Optimizer, rows: list):
        self.optimizer = optimizer
        self.rows = rows
        self.cadence = optimizer.cfg.adam_every
        self.weights = [optimizer.model.get_parameter(row.label) for row in rows]
        for row, p in zip(rows, self.weights):
            optimizer.state[row.label] = initial_state(row, p.data)

    def has_gradient(self):
        return all(p.grad is not None for p in self.weights)

    def reduce(self):
        # They are few numbers: one message, in accum_dtype for all.
        self.grad = torch.cat([p.grad.flatten().to(accum_dtype(p.dtype)) for p in self.weights])
        self.wait = self.optimizer.launch(dist.all_reduce, self.grad)

    def update(self, values: Values):
        grads = self.grad.split([p.numel() for p in self.weights])
        for row, p, grad in zip(self.rows, self.weights, grads):
            self.optimizer.adam(row, p.data, grad.view_as(p), values)
        return do_nothing

    def clear(self):
        for p in self.weights:
            p.grad = None

class Sharded:
    """A bank, or the head: rank r updates the r-th of W equal shards of its matrices or rows, and has their state."""
    def __init__(self, optimizer: Optimizer, row: Parameter, accumulates: bool):
        fabric = optimizer.fabric
        weight = optimizer.model.get_parameter(row.label)
        units = bank_matrices(row, weight.data)
        is_bank = row.optimizer == "normuon"
        self.optimizer = optimizer
        self.row = row
        self.weight = weight
        self.cadence = 1 if is_bank else optimizer.cfg.adam_every

        # The weight moves for good into W whole shards, on which collectives work in place; they alone see the padding.
        count = len(units)
        self.shard_size = -(-count // fabric.world)
        self.padded = units.new_zeros(self.shard_size * fabric.world, *units.shape[1:])
        self.padded[:count] = units
        weight.data = self.padded[:count].view_as(weight)
        first = fabric.rank * self.shard_size
        self.slice = slice(first, first + self.shard_size)
        self.shard = self.padded[:count][self.slice]
        optimizer.state[row.label] = initial_state(row, self.shard)
        if row.label == "lm_head":
            vocabulary = read_grammar(optimizer.cfg).tokens
            tokens, shared = map(torch.from_numpy, spellings(vocabulary if any(vocabulary) else None))
            count = int(shared.max()) + 1 if len(shared) else 0
            order = shared.argsort(stable=True)
            self.spellings = shared, torch.searchsorted(tokens, torch.arange(len(vocabulary)))
            self.spelled = tokens[order], torch.searchsorted(shared[order], torch.arange(count))
            zeros = self.shard.new_zeros(count, len(self.shard))
            optimizer.state[row.label] |= {name: zeros.clone() for name in ("shared", "shared_m", "shared_v")}

        # What is written several times, by micro-batches or by the steps of an Adam cycle, adds up in f32; what travels
        # has the weight's type.
        accum = accum_dtype(weight.dtype)
        self.main_grad = torch.zeros_like(self.padded, dtype=accum if accumulates or not is_bank else weight.dtype)
        self.comm_buffer = self.main_grad
        if fabric.world > 1:
            self.comm_buffer = self.main_grad.to(weight.dtype)                # no copy if the type is the same
        weight.main_grad = self.main_grad[:count].view_as(weight)
        weight.writes = torch.zeros(len(row.parts) * (len(weight) if is_bank else 1), dtype=torch.int64)
        self.backwards = 0               # passes since the clear, each of which writes every part once

        # Tall matrices move by the root of their aspect ratio, down matrices of the MLP by twice that.
        if is_bank:
            aspect = max(1.0, units.shape[-2] / units.shape[-1]) ** 0.5
            lr_muls = units.new_full((count, 1, 1), aspect, dtype=accum)
            if row.label == "mlp":
                lr_muls[1::UP_AND_DOWN] *= DOWN_LR_MUL                        # up, down, up, down, ...
            self.lr_muls = lr_muls[self.slice]

    def has_gradient(self):
        """True if a backward pass has run. Raises RunError unless each one wrote every part of the main_grad once."""
        writes = self.weight.writes
        need(writes.eq(self.backwards).all(), f"main_grad of {self.row.label}", f"written {writes.tolist()} times, by "
             "part", f"{self.backwards} times each, once in every backward pass since the last update",
             "a micro-batch was lost or ran twice: drop_gradients, and repeat the step", RunError)
        return self.backwards > 0

    def reduce(self):
        self.comm_buffer.copy_(self.main_grad)                                # no copy where both are one tensor
        self.grad = self.comm_buffer[self.slice]
        self.wait = self.optimizer.launch(dist.reduce_scatter_tensor, self.grad, self.comm_buffer)

    def update(self, values: Values):
        """Update the shard. Returns the wait for the shards of other ranks."""
        optimizer = self.optimizer
        grad = self.grad[:len(self.shard)]
        if self.row.optimizer == "adam":
            optimizer.adam(self.row, self.shard, grad, values)
            if self.row.label == "lm_head":
                self.update_shared(grad, values)
        elif len(self.shard) > 0:                             # more ranks than matrices: some have none
            state = optimizer.state[self.row.label]
            lr = cpu_scalar(values.normuon_lr)
            decay = lr * optimizer.cfg.normuon_weight_decay                   # times the rate again in the update
            optimizer.normuon_update(
                self.shard, state.get("mantissa"), grad, state["momentum"], state["second"], optimizer.grad_scale,
                cpu_scalar(values.momentum), lr, self.lr_muls, decay, optimizer.cfg.normuon_beta2)
        return optimizer.launch(dist.all_gather_into_tensor, self.padded, self.padded[self.slice])

    def update_shared(self, grad, values: Values):
        """Add a second Adam step: tokens that share a spelling share a row, a part of each of their embeddings."""
        # The head is the sum of a row per token and of the rows of its spellings; only the sum is kept.
        optimizer = self.optimizer
        state = optimizer.state["lm_head"]
        rows = state["shared"]
        before = rows.clone()
        tokens, offsets = self.spelled
        shared_grad = F.embedding_bag(tokens, grad.t().contiguous(), offsets, mode="sum")
        _, step_size, decay = optimizer.adam_numbers(self.row, values)
        optimizer.adam_update(rows, shared_grad, state["shared_m"], state["shared_v"], optimizer.grad_scale,
                              self.row.betas, optimizer.cfg.adam_eps, SHARED_RATE * step_size, decay)
        shared, offsets = self.spellings
        self.shard.add_(F.embedding_bag(shared, rows - before, offsets, mode="sum").t())

    def clear(self):
        """Drop the gradient. The main_grad keeps what it holds: the next write overwrites it."""
        self.backwards = 0
        self.weight.grad = None
        self.weight.writes.zero_()

class TableEntry:
    """A table: its RowTable brings the gradients of the rows that this rank owns, and takes rows to their readers."""
    def __init__(self, optimizer: Optimizer, row: Parameter, table: RowTable):
        self.optimizer = optimizer
        self.row = row
        self.table = table
        self.cadence = row.rows.cadence
        if table.home is None:
            optimizer.state[row.label] = initial_state(row, table.shard)

    def has_gradient(self):
        return bool(self.table.pending)

    def reduce(self):
        self.grad, self.wait = self.table.return_gradients()

    def update(self, values: Values):
        optimizer = self.optimizer
        row = self.row
        table = self.table
        if table.home is None:
            optimizer.adam(row, table.shard, self.grad, values)
            return do_nothing
        number, step_size, decay = optimizer.adam_numbers(row, values)
        number = torch.full((), number, dtype=torch.int32, device=self.grad.device)  # made there: a copy would wait
        changing = [*table.live, self.grad]
        # Random bits depend on logical row numbers: the same at every W.
        bits = None
        if row.rows.rounding == "stochastic" and table.live.rows.dtype == torch.bfloat16:
            places = table.pending[0].update.places.to(number.device, non_blocking=True)
            rows = places * optimizer.fabric.world + optimizer.fabric.rank
            bits = row_bits(optimizer.seed, row.label, rows, number)
            changing.append(bits)
        if optimizer.rowwise_update is not rowwise_update:    # compiled: one graph for any number of rows
            for x in changing:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        optimizer.rowwise_update(*table.live, self.grad, optimizer.grad_scale, number, row.betas[1],
                                 optimizer.cfg.adam_eps, step_size, decay, bits)
        table.put_back()
        return do_nothing

    def clear(self):
        self.grad = None
        self.wait = do_nothing                                                # the old one keeps `arrived` alive
        self.table.clear()

class Optimizer:
    """NorMuon on banks at every step, Adam on the rest every cfg.adam_every steps; gradients are sums over slots."""
    def __init__(self, cfg: Config, fabric: Fabric, model: GPT, compiled: Callable, tables: dict[str, RowTable],
                 accumulates: bool = False):
        """compiled(f): f by torch.compile, or f itself. accumulates: this rank takes several micro-batches."""
        self.cfg = cfg
        self.fabric = fabric
        self.model = model
        self.grad_scale = 1 / cfg.num_slots                                   # the objective is a mean over slots
        self.seed = cfg.seed
        self.normuon_update = compiled(normuon_update)
        self.adam_update = compiled(adam_update)
        self.rowwise_update = compiled(rowwise_update)
        self.tables = tables

        # By label: the state of what this rank owns. Its names are those of snapshots and checkpoints.
        self.state = {}
        self.entries = {}
        self.sharded = {}
        alike = []
        for row in parameter_table(cfg):
            if row.rows:
                self.entries[row.label] = TableEntry(self, row, tables[row.label])
            elif row.parts:
                self.entries[row.label] = self.sharded[row.label] = Sharded(self, row, accumulates)
            else:
                alike.append(row)
        self.entries[SMALL] = Small(self, alike)
        # Tables of n-grams come into both orders. An entry that is missing there would never be trained.
        ngrams = [table.label for table in cfg.tables]
        orders = ((*order[:-1], *ngrams, order[-1]) for order in (REDUCE_ORDER, UPDATE_ORDER))
        self.reduce_order, self.update_order = orders
        assert sorted(self.reduce_order) == sorted(self.update_order) == sorted(self.entries), "an entry once in each"

    def launch(self, collective: Callable, *tensors: Tensor):
        """Launch a collective of all ranks, unless this rank is alone. Returns the wait."""
        return do_nothing if self.fabric.world == 1 else collective(*tensors, async_op=True).wait

    def add_zeros(self):
        """Begin a gradient of zeros where there is none: a rank with nothing to add still joins the reductions."""
        for entry in self.sharded.values():
            if entry.backwards == 0:
                entry.backwards = 1
                entry.weight.writes.fill_(1)
                entry.main_grad.zero_()
        for p in self.entries[SMALL].weights:
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, values: Values, plans_ahead: Callable):
        """Reduce, update and gather what this step updates, then clear its gradients; the others keep theirs.
        plans_ahead() gives the plans of the next cycle, or None. Raises RunError without a gradient."""
        # What is missing is found before anything is launched, so that no weight has changed.
        active = [label for label, entry in self.entries.items() if (values.step + 1) % entry.cadence == 0]
        missing = [label for label in active if not self.entries[label].has_gradient()]
        need(not missing, "optim_step", f"no gradient of {sorted(missing)}", "one of each", "forward_backward first",
             RunError)

        # While they are tied, head and embedding are one parameter with one gradient.
        head = self.model.lm_head
        tied_update = values.tied and "embed" in active
        if tied_update:
            self.tables["embed"].add_to_head(head.main_grad)
            active.remove("embed")

        # All reductions are launched before the first update, all gathers before the first wait for one.
        for label in self.reduce_order:
            if label in active:
                self.entries[label].reduce()
        gathers = []
        for label in self.update_order:
            if label in active:
                entry = self.entries[label]
                entry.wait()
                gathers.append(entry.update(values))
                entry.clear()
                # Rows of a table's next cycle are launched at once: its first lookup waits for them.
                plans = plans_ahead() if label in self.tables else None
                if plans:
                    self.tables[label].fetch(plans[label])
        for wait in gathers:
            wait()
        if tied_update and self.fabric.world == 1:                            # else its rows are read from the head
            self.model.embed.copy_(head.t())
        if values.untie:
            self._untie()

    def adam_numbers(self, row: Parameter, values: Values):
        """Return the number of an update by Adam or a row-wise one, from 1, its step size and its decay."""
        cadence = self.cfg.adam_every if row.rows is None else row.rows.cadence
        number = (values.step + 1) // cadence
        beta1, beta2 = row.betas
        lr = values.adam_lr * row.lr_mul
        corrected = math.sqrt(1 - beta2**number) / (1 - beta1**number)
        decay = lr * lr * self.cfg.adam_weight_decay * row.wd_mul             # quadratic in the schedule (RECIPE 3.3)
        return number, cpu_scalar(lr * corrected), cpu_scalar(decay)

    def adam(self, row: Parameter, p: Tensor, grad: Tensor, values: Values):
        state = self.state[row.label]
        _, step_size, decay = self.adam_numbers(row, values)
        self.adam_update(p, grad, state["m"], state["v"], self.grad_scale, row.betas, self.cfg.adam_eps, step_size,
                         decay)

    def _untie(self):
        """Make head and embedding two parameters; the embedding starts with the head's weights and moments."""
        W = self.fabric.world
        weight = self.model.lm_head                                           # (D, V)
        # The head's moments are owned along D and the embedding's along V, of which rank r has r, r + W, ...
        for name, moment in self.state["embed"].items():
            size, depth = moment.shape
            owned = self.state["lm_head"][name]
            padded = F.pad(owned, (0, W * size - weight.shape[1], 0, self.sharded["lm_head"].shard_size - len(owned)))
            leaving = padded.t().view(size, W, -1).transpose(0, 1).contiguous()           # by owner
            arrived = leaving.clone()
            self.launch(dist.all_to_all_single, arrived, leaving)()
            moment.copy_(arrived.transpose(0, 1).reshape(size, -1)[:, :depth])
        rows = weight.t()[self.fabric.rank::W]
        self.tables["embed"].shard[:len(rows)] = rows


# ====== Room 8: Executor ==============================================================================================
EVAL_ROWS = 8192                         # rows of validation logits at a time: evaluation never decides the memory
RECOMPILE_LIMIT = 64                     # graphs of one function: each set of shapes, each span of the reference

class Losses(NamedTuple):
    """Unscaled loss of one forward_backward on this rank; on the device, nothing waited for."""
    slot_sums: Tensor                    # (b,) f32 or f64: sum over the slot's positions
    tokens: int

class Executor:
    """Runs slots through the model and updates it. Knows no step numbers beyond `values`, and no logs."""
    def __init__(self, cfg: Config, fabric: Fabric, attention: Callable, precision: str | None,
                 slots_at_once: int = 0, report: Callable = do_nothing):
        """precision: of the head, "plain", "fp8" or "emulated"; None: no optimizer. slots_at_once: 0 for all."""
        self.cfg = cfg
        self.fabric = fabric
        self.precision = precision
        self.rotary = None                                    # the Rotary whose angles the model holds
        self.accum_dtype = accum_dtype(getattr(torch, cfg.dtype))
        self.slots_at_once = slots_at_once or cfg.num_slots // fabric.world
        self.planner = Planner(cfg, fabric, self.exchange)

        # Buffers are made for the largest batch of the run: none grows, and every address stays.
        largest_batch = max(stage.batch_tokens for stage in cfg.stages)
        longest_slot = max(cfg.val_batch_tokens, largest_batch) // cfg.num_slots
        self.model = GPT(cfg, attention, longest_slot, self.planner.shard_sizes)
        self.model.set_initial_values(cfg.seed, self.shard)
        self.model.to(fabric.device)
        self.tables = {}
        weights = dict(self.model.named_parameters())
        for table in self.planner.tables:
            most_tokens = table.cadence * largest_batch // fabric.world if precision else 0
            self.tables[table.label] = RowTable(table, cfg, fabric, weights.get(table.label), most_tokens, report,
                                                self.model.lm_head)

        # Only what is called often, and with few sets of shapes, is compiled.
        self.compiling = cfg.compile == 1 or (cfg.compile and fabric.on_cuda)
        if self.compiling:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self.model_hidden = self.compiled(self.model.hidden)
        self.model_losses = self.compiled(self.model.losses)
        self.next_token_losses = self.compiled(next_token_losses)
        if precision:
            accumulates = self.slots_at_once * fabric.world < cfg.num_slots
            self.optimizer = Optimizer(cfg, fabric, self.model, self.compiled, self.tables, accumulates)

    def compiled(self, call: Callable):
        return torch.compile(call, dynamic=False, fullgraph=True) if self.compiling else call

    def shard(self, name: str, whole: Tensor):
        """Return what this rank keeps of a whole weight or moment; of a table every W-th row, and zeros after them."""
        label, is_moment, _ = name.partition(".")
        if is_moment and label in self.optimizer.sharded:
            return whole[self.optimizer.sharded[label].slice]
        if label not in self.planner.shard_sizes:
            return whole
        rows = whole[self.fabric.rank::self.fabric.world]
        return F.pad(rows, (0, 0, 0, self.planner.shard_sizes[label] - len(rows)))

    def exchange(self, plans: dict[str, TablePlan], group=None):
        """Let ranks request rows of each other, in the caller's thread."""
        if self.fabric.world > 1:
            exchange_plans(self.fabric, group, self.cfg.dtype, plans)

    def exchange_ahead(self, plans: dict[str, TablePlan]):
        """Exchange in the loader's thread, and prepare the next update of row-wise tables."""
        self.exchange(plans, self.fabric.plan_group)
        for label, plan in plans.items():
            self.tables[label].prepare(plan)

    def forward_backward(self, batch: Batch, values: Values, loss_weight: float = 1.0) -> Losses:
        """Add loss_weight * d(sum of this rank's slot losses) to the gradients. Does not wait for the device.
        A weight of 0 adds zeros, whatever the loss: this rank still takes part in the update."""
        # Rows of tables were launched after the last update; here the wait for them ends.
        spans = self._attention_of(values, min(self.cfg.max_doc_len, batch.tokens.shape[1]))
        row_buffers = {}
        for label, table in self.tables.items():
            row_buffers[label] = table.rows_for_forward(batch.plans[label])

        # Scalars are made on the device: a copy from the host would wait.
        scalar = functools.partial(torch.full, (), dtype=self.accum_dtype, device=self.fabric.device)
        weights = torch.stack([scalar(weight) for weight in values.mtp_weights])
        backward_seed = scalar(loss_weight)

        # Micro-batches change nothing but rounding: each adds its sums to the same gradients.
        sums = []
        for part in self._micro_batches(batch):
            slot_sums = self.model_losses(part, weights, backward_seed, spans, self.precision, row_buffers).sum(dim=1)
            if loss_weight:
                for entry in self.optimizer.sharded.values():
                    entry.backwards += 1                      # and each part of its main_grad is written once more
                slot_sums.sum().backward(backward_seed)
            else:
                self.optimizer.add_zeros()
            sums.append(slot_sums.detach())
        return Losses(torch.cat(sums), batch.tokens.numel())

    def optim_step(self, values: Values, plans_ahead: Callable = do_nothing):
        """Update what this step updates with the gradients so far, and clear these. plans_ahead: see Loader."""
        self.optimizer.step(values, plans_ahead)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], values: Values):
        """Return the mean loss per token (nats) over all ranks' batches: next token, no fp8, documents uncut."""
        # The sum stays on the device, so that no batch waits for a copy, and in f64: it is of millions of losses.
        total = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        tokens = 0
        for batch in batches:
            spans, row_buffers = self._for_reading(batch, values)
            for part in self._micro_batches(batch):
                rows = self.model_hidden(part, spans, row_buffers).flatten(0, 1)
                split = [x.flatten().split(EVAL_ROWS) for x in (part.targets, part.states)]
                for y, targets, states in zip(rows.split(EVAL_ROWS), *split):
                    losses = self.next_token_losses(y, self.model.lm_head, targets, states, self.model.possible)
                    total += losses.sum(dtype=torch.float64)
            tokens += batch.targets.numel() * self.fabric.world
        return sum(self.fabric.gather(float(total))) / tokens

    @torch.no_grad()
    def next_logits(self, tokens: list, values: Values):
        """Return logits (V,) of the token that follows the last that fit a validation slot. Collective."""
        # A slot has a length that attention takes; no position looks at those after it, which are padding.
        context = tokens[-(self.cfg.val_batch_tokens // self.cfg.num_slots):]
        length = -(-len(context) // SLOT_UNIT) * SLOT_UNIT
        padded = np.zeros(length + 1, np.uint16)
        padded[:len(context)] = context
        slot = Slot(padded, np.asarray([0, length], np.int32))
        batch, = self.planner.batches("sample", [values], [[slot]])
        batch = batch.to(self.fabric.device)
        hidden = self.model.hidden(batch, *self._for_reading(batch, values))
        return (hidden[0, len(context) - 1] @ self.model.lm_head).to(self.accum_dtype)

    def _for_reading(self, batch: Batch, values: Values):
        """Return the spans of uncut documents, and rows of tables that take no gradient."""
        row_buffers = {}
        for label, table in self.tables.items():
            row_buffers[label] = table.read(batch.plans[label])
            if self.compiling and not table.alone:            # one graph for any number of rows
                torch._dynamo.maybe_mark_dynamic(row_buffers[label][0], 0)
        return self._attention_of(values, batch.tokens.shape[1]), row_buffers

    def _attention_of(self, values: Values, longest: int):
        """Set the rotary tables, and return the spans. longest: upper bound of a document's length in tokens."""
        if values.rotary != self.rotary:
            self.model.set_rotary(values.rotary.frequencies)
            self.rotary = values.rotary
        return spans_of(values.short_window, values.long_window, longest, values.rotary.attn_scale)

    def _micro_batches(self, batch: Batch):
        for first in range(0, len(batch.tokens), self.slots_at_once):
            part = batch.map(operator.itemgetter(slice(first, first + self.slots_at_once)))
            if self.compiling:                                # any number of documents, one graph
                torch._dynamo.maybe_mark_dynamic(part.cu_seqlens, 1)
            yield part

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
        touched = [(table.home, list(table.home.touched())) for table in self.tables.values() if table.home]
        rng = torch.get_rng_state()                           # of the device nothing draws

        @torch.no_grad()
        def restore():
            # Every tensor keeps its address, so that nothing recompiles.
            for name, x in self.state_tensors().items():
                x.copy_(copies[name])
            for home, pieces in touched:
                home.load(pieces)
            self.rotary = None                                # the next step makes its angles
            self.drop_gradients()
            torch.set_rng_state(rng)

        return restore

    def set_seed(self, seed: int):
        self.model.set_initial_values(seed, self.shard)
        self.optimizer.seed = seed

    def drop_gradients(self):
        """Forget what calls have added so far; a table also forgets what it has fetched and counted."""
        for label, entry in self.optimizer.entries.items():
            if label in self.tables:
                self.tables[label].reset()
            else:
                entry.clear()

    def _whole(self, name: str, x: Tensor):
        """Return a weight or a moment as a whole, in logical order, on the host of rank 0. Collective."""
        label, is_moment, _ = name.partition(".")
        is_shard = is_moment and label in self.optimizer.sharded
        if label not in self.tables and not is_shard:
            return x.to("cpu", copy=True)
        # Piece by piece: messages go through memory of the device.
        pieces = [self.fabric.gather(piece.cpu()) for piece in x.split(PIECE_ROWS)]
        if self.fabric.rank != 0:
            return None
        if is_shard:
            return torch.cat(*pieces)                         # few matrices or rows: one piece
        # Row r is at rank r mod W, and padding follows the last.
        rows = torch.cat([torch.stack(everyone, dim=1).flatten(0, 1) for everyone in pieces])
        return rows[:self.tables[label].table.rows]

    def whole_weights(self, values: Values):
        """Return all weights except row-wise tables, in logical shapes, on rank 0's host; elsewhere tables are None.
        Collective. values: of the next step to train, which say whether the embedding is still the head."""
        weights = {label: self._whole(label, p) for label, p in self.model.state_dict().items()}
        if values.tied:
            weights["embed"] = weights["lm_head"].t().contiguous()
        return weights

    def whole_state(self, values: Values):
        """Return weights and optimizer state as `whole_weights` does: equal at every W. Between cycles; collective."""
        moments = {name: self._whole(name, x) for name, x in self.state_tensors().items() if "." in name}
        return dict(weights=self.whole_weights(values), moments=moments)

    @torch.no_grad()
    def load_state(self, wholes: dict):
        """Copy this rank's part of whole weights and moments in place; `check_tensors` has looked at them."""
        for name, x in self.state_tensors().items():
            x.copy_(self.shard(name, wholes[name]))
        self.drop_gradients()

    def traffic(self):
        """Return by table the byte counts of training, summed over ranks. Collective."""
        result = {}
        for label, table in self.tables.items():
            result[label] = Counter()
            for totals in self.fabric.gather(table.totals):
                result[label].update(totals)
        return result


# ---- Memory: an estimate before anything is built
MEMORY_SHARE = 0.9                       # of a device: the rest is for its driver, NCCL, the allocator, the compiler
ON_HOST = "tables on the host"           # the part that takes memory row by row, as rows are updated
# What a step keeps per token at its peak, in the head: compiled (counted by tests/rehearse.py), or in plain PyTorch.
SAVED_ROWS = 17                          # of width D, in each layer: 183 in 11 layers, and statistics in f32
SAVED_ROWS_PLAIN = 26
LOGIT_COPIES = 1.5                       # logits in bf16, and their gradient in fp8
LOGIT_COPIES_PLAIN = 6                   # the same in f32 or f64

def memory_estimate(cfg: Config, fabric: Fabric, kernel: Callable, slots_at_once: int):
    """Return the most memory that a rank takes, bytes by part: activations by the constants above, all else counted."""
    W = fabric.world
    dtype = getattr(torch, cfg.dtype)
    item = dtype.itemsize
    accum_item = accum_dtype(dtype).itemsize
    largest_batch = max(stage.batch_tokens for stage in cfg.stages)
    parts = Counter()
    for row in parameter_table(cfg):
        table = row.rows
        kept = math.prod(row.shape)                           # numbers that have a gradient here
        gradient = accum_item                                 # bytes of each
        if table:
            # A shard, and a cache of the most that a cycle may read. A row-wise table also has the rows of one update
            # on the device, with a host home those of two. (Their state is left out: 8 bytes a row.)
            shard = kept // W
            read = table.cadence * largest_batch * table.reads * cfg.model_dim           # by all ranks
            cache = min(kept, read // W) if table.is_rowwise or cfg.row_comms == "sparse" else kept
            if table.is_rowwise:
                home = ON_HOST if table.home == "host" or not fabric.on_cuda else "weights"
                parts[home] += shard * item
                parts["weights"] += min(shard, read) * item * (2 if table.home == "host" else 1)
                kept = cache
            elif W > 1:
                kept = shard + cache
        elif row.optimizer == "normuon" and slots_at_once * W >= cfg.num_slots:
            gradient = item                                   # written once, and sent as it is
        elif W > 1 and accum_item > item:
            gradient += item                                  # the copy that is sent
        parts["weights"] += kept * item
        parts["gradients"] += kept * gradient
        if row.optimizer != "rowwise":
            state = initial_state(row, torch.empty(row.shape, dtype=dtype, device="meta"))
            owners = W if row.rows or row.parts else 1
            parts["moments"] += sum(x.nbytes for x in state.values()) // owners

    # Activations of a step of the largest stage. Evaluation, whose logits come in chunks, and updates of rows take
    # less, unless slots are many and short.
    saved_rows = SAVED_ROWS
    logit_bytes = LOGIT_COPIES * item
    if kernel is not attention_varlen:
        saved_rows = SAVED_ROWS_PLAIN
        logit_bytes = LOGIT_COPIES_PLAIN * accum_item
    token_bytes = len(LAYERS) * saved_rows * cfg.model_dim * item + int(cfg.padded_vocab * logit_bytes)
    parts["working"] = slots_at_once * largest_batch * token_bytes // cfg.num_slots
    return parts

def fit_memory(cfg: Config, fabric: Fabric, kernel: Callable):
    """Return how many slots go through the model at once, and the estimate of what that takes. Raises RunError."""
    # They follow from the card, not from what others use of it now: a run is the same each time.
    local = cfg.num_slots // fabric.world
    room = MEMORY_SHARE * min(fabric.gather(fabric.total_memory()))
    choices = [m for m in range(local, 0, -1) if local % m == 0]
    if cfg.slots_per_micro_batch:
        choices = [min(cfg.slots_per_micro_batch, local)]
    # As many slots as fit: products are larger then, and graphs run less often.
    for slots_at_once in choices:
        estimate = memory_estimate(cfg, fabric, kernel, slots_at_once)
        if estimate.total() - estimate[ON_HOST] <= room:
            return slots_at_once, estimate
    parts = ", ".join(f"{part} {size / 2**30:.1f} GiB" for part, size in estimate.items())
    raise RunError("memory", f"{room / 2**30:.1f} GiB to use", f"room for {parts}",
                   "more ranks, a larger device, more and shorter slots (--num_slots=32), --slots_per_micro_batch=1, "
                   "smaller batches in --stages, fewer rows in --tables or home host there, a smaller model")


# ---- Files: a save and a checkpoint are folders, whole before they have their name. Loading runs no code.
CHECKPOINTS = "checkpoints"              # folder in the run directory
UNFINISHED = set()                       # folders that this process writes and has not named: its end removes them

def file_sha256(path: Path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def sync_to_disk(path: Path):
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)

@contextlib.contextmanager
def refused(path: Path, kind=RunError):
    """Turn what the system raises in the body, for a full disk say, into an error of that kind with the path."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:      # torch.save makes RuntimeErrors of what the disk says
        raise kind(f"writing {path}", error.__context__ or error, "room, and the right to write there",
                   "free some, or name another folder") from None

@contextlib.contextmanager
def damaged(path: Path):
    """Turn any error in the body, other than our own, into a DataError that names the path."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:           # without torch's text, which advises to let a file run its code
        found = getattr(error, "strerror", None) or f"damaged, unreadable or with code in it ({type(error).__name__})"
        raise DataError(path, found, "content as this trainer writes it", "take another, write it again, or use the "
                        "trainer that wrote it") from None

def part_of(folder: Path, run_id: str):
    """Return where a run writes a folder until it is whole; no other run touches it."""
    return folder.with_name(f"{folder.name}.{run_id}.part")

def write_folder(folder: Path, run_id: str, files: dict, executor: Executor):
    """Write a new folder with these files of rank 0, name -> bytes or what torch.save takes, and each rank's rows; then
    give it its name. Raises RunError. Collective."""
    fabric = executor.fabric
    part = part_of(folder, run_id)
    contents = row_files(executor)                            # each made when the one before it is on the disk
    if fabric.rank == 0:
        contents = itertools.chain(files.items(), contents)

    def write(name: str, content):
        path = part / name
        with open(path, "xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                torch.save(content, file)
        sync_to_disk(path)
        return dict(bytes=path.stat().st_size, sha256=file_sha256(path))

    UNFINISHED.add(part)
    try:
        with fabric.failing_together(), refused(part):
            if fabric.rank == 0:
                part.mkdir(parents=True)
        with fabric.failing_together(), refused(part):
            facts = {name: write(name, content) for name, content in contents}
        # The name comes last, when every byte under it is on the disk.
        facts = functools.reduce(operator.or_, fabric.gather(facts))
        with fabric.failing_together(), refused(folder):
            if fabric.rank == 0:
                write(MANIFEST, json.dumps(dict(format=max(MANIFEST_FORMATS), files=facts), indent=1).encode())
                sync_to_disk(part)
                part.rename(folder)                           # fails if another run has taken the name
                sync_to_disk(folder.parent)
    finally:
        UNFINISHED.discard(part)
        if fabric.rank == 0:
            shutil.rmtree(part, ignore_errors=True)           # of a failure; else nothing has this name any more

def read_tensors(path: Path, manifest: dict):
    """Return what torch.save wrote; no code in it is run. Raises DataError, whatever the file is."""
    with damaged(path):
        need(path.is_file() and file_sha256(path) == manifest.get(path.name), path, "no such file, or another content "
             "than its manifest says", "the file as it was written", "name a folder that --save made; if this is "
             "one, it is damaged: copy it again", DataError)
        return torch.load(path, "cpu", weights_only=True, mmap=True)

def check_tensors(path: Path, cfg: Config, found, with_moments: bool = False):
    """Raise DataError unless names, shapes and dtypes are those of this config's weights, with or without moments."""
    dtype = getattr(torch, cfg.dtype)
    tensors = {}
    for row in parameter_table(cfg):
        if row.optimizer != "rowwise":
            own_dtype = accum_dtype(dtype) if row.full_precision else dtype
            weight = tensors[row.label] = torch.empty(row.shape, dtype=own_dtype, device="meta")
            if with_moments:
                state = initial_state(row, weight)
                tensors |= {f"{row.label}.{name}": x for name, x in state.items()}
    expected = {name: (x.dtype, *x.shape) for name, x in tensors.items()}
    with damaged(path):
        found = {name: (x.dtype, *x.shape) for name, x in found.items()}
    for name in expected | found:
        need(found.get(name) == expected.get(name), f"{name} in {path}", found.get(name, "no such tensor"),
             expected.get(name, "no such tensor"), "use the trainer and settings of that run", DataError)

def row_files(executor: Executor):
    """Yield (name, content) of the files with this rank's touched rows of row-wise tables, by logical row number."""
    fabric = executor.fabric
    for label, table in executor.tables.items():
        if table.home:
            # In pieces, for a table may be larger than the memory that is left.
            for number, (places, state) in enumerate(table.home.touched()):
                name = f"rows-{label}-{fabric.rank}of{fabric.world}-{number}.pt"
                yield name, dict(state._asdict(), ids=places * fabric.world + fabric.rank)

def load_rows(folder: Path, manifest: dict, executor: Executor):
    """Load the row-wise tables of a save or checkpoint: each rank takes the rows that it owns. Raises DataError."""
    fabric = executor.fabric

    def own_rows(label: str, dtype: torch.dtype):
        """Yield places and rows, file by file."""
        for name in manifest:
            if re.fullmatch(rf"rows-{label}-\d+of\d+-\d+\.pt", name):
                content = read_tensors(folder / name, manifest)
                owned = content["ids"] % fabric.world == fabric.rank
                rows, v, last = (content[part][owned] for part in RowState._fields)
                yield content["ids"][owned] // fabric.world, RowState(rows.to(dtype), v, last)

    for label, table in executor.tables.items():
        if table.home:
            with damaged(folder):                             # rows of another width, type or table
                table.home.load(own_rows(label, table.shard.dtype))

def settings_json(cfg: Config):
    """Return a run's settings as texts of its flags; `read_settings` reads them."""
    return json.dumps({name: flag_text(value) for name, value in vars(cfg).items()}, indent=1).encode()

def save(folder: Path, run_id: str, cfg: Config, executor: Executor, values: Values, vocabulary: list[bytes] | None):
    """Save weights in logical shapes, settings, and the bytes of the tokens. Raises RunError. Collective."""
    files = {"weights.pt": executor.whole_weights(values), SETTINGS: settings_json(cfg)}
    if vocabulary is not None:
        lines = [b"%s %d\n" % (base64.b64encode(piece), token) for token, piece in enumerate(vocabulary) if piece]
        files[VOCABULARY] = b"".join(lines)
    write_folder(folder, run_id, files, executor)

def load_checkpoint(run_dir: Path, executor: Executor):
    """Load the newest checkpoint that is whole on every rank; return the rest of it. Raises DataError. Collective."""
    fabric = executor.fabric
    newest_first = sorted((run_dir / CHECKPOINTS).glob("step-???????"), reverse=True)
    fabric.check_agreement(dict(checkpoints=str([path.name for path in newest_first])))
    # What one rank cannot read nobody takes: all ranks go on from the same step.
    for path in newest_first:
        run = path / "run.pt"
        try:
            with fabric.failing_together(), damaged(run):
                manifest = read_manifest(path)
                content = read_tensors(run, manifest)
                state = content.pop("state")
                wholes = state["weights"] | state["moments"]
                check_tensors(run, executor.cfg, wholes, with_moments=True)
                executor.load_state(wholes)
                load_rows(path, manifest, executor)
                return content
        except DataError as error:
            fabric.say(f"{error}\nthe checkpoint before {path.name} is taken, if there is one")
    raise DataError(f"checkpoints in {run_dir}", [path.name for path in newest_first], "a whole one of this trainer",
                    "--resume the run before it, if it was itself resumed; or start anew, with --checkpoint_every=100")


# ====== Room 9: Race ==================================================================================================
LOGS = ("log.txt", "log.jsonl")
PLAIN_LINES = 20                         # step lines of a whole run on a console that is no terminal
NEW_LOG = dict(tokens=0, done=0, last_good="none", lines={})     # `Log.state` of a run that begins

class Clock:
    """Training time in ms. Waits for the device only when it starts and stops."""
    def __init__(self, fabric: Fabric, before: float = 0.0):
        self.fabric = fabric
        # ms up to the last stop, and s of the start or None: a pair, which the loader's thread reads whole.
        self.state = before, None

    @property
    def ms(self):
        before, since = self.state
        return before if since is None else before + (time.perf_counter() - since) * 1000

    def start(self):
        self.fabric.synchronize()
        self.state = self.ms, time.perf_counter()

    def stop(self):
        self.fabric.synchronize()
        self.state = self.ms, None

class Log:
    """log.txt for people and existing parsers, log.jsonl as the source of truth, and the console of rank 0.
    Losses are read one Adam cycle late, so that no step waits for the device. Every rank checks its own. beside:
    content of further files of the run directory; earlier: what `state` gave to a checkpoint."""
    def __init__(self, run_dir: Path, fabric: Fabric, schedule: Schedule, beside: dict, earlier: dict = NEW_LOG):
        self.run_dir = run_dir
        self.fabric = fabric
        self.schedule = schedule
        self.total = schedule.total_steps                     # steps of the run; a forecast if there is a time budget
        self.tokens = earlier["tokens"]
        self.done = earlier["done"]      # steps
        self.last_good = earlier["last_good"]                 # validation, in words
        self.pending = []                # steps whose loss is not read yet: (fields, slot sums, tokens, CUDA event)
        self.files = {}
        self.on_terminal = fabric.rank == 0 and sys.stderr.isatty()
        if fabric.rank == 0:
            # An existing log is another run's. Without buffers a killed run leaves every line.
            with refused(run_dir):
                run_dir.mkdir(parents=True, exist_ok=True)
                for name in LOGS:
                    self.files[name] = open(run_dir / name, "xb", buffering=0)
                for name, content in beside.items():
                    (run_dir / name).write_bytes(content)
        for name, text in earlier["lines"].items():
            self._write(name, text.encode())

    def state(self):
        """Return what a checkpoint needs to go on with this log."""
        self.flush()
        return dict(tokens=self.tokens, done=self.done, last_good=self.last_good,
                    lines={name: (self.run_dir / name).read_text("utf-8") for name in self.files})

    def event(self, kind: str, **fields):
        self._write("log.jsonl", (json.dumps(dict(type=kind, **fields)) + "\n").encode())

    def text(self, line: str):
        """Write a line of log.txt, and print it on the console."""
        self._write("log.txt", (line + "\n").encode("utf-8", "replace"))
        self.show("")
        self.fabric.say(line)

    def show(self, progress: str):
        """Put this in the place of the last line of a terminal, and let whatever follows overwrite it."""
        if self.on_terminal:
            with contextlib.suppress(OSError):
                most = shutil.get_terminal_size().columns - 1                 # a line that wraps would stay
                print(f"\r\x1b[K{progress[:most]}\r", end="", file=sys.stderr, flush=True)

    def _write(self, name: str, data: bytes):
        file = self.files.get(name)                                           # of rank 0, until the log is closed
        if file is not None:
            with refused(self.run_dir / name):
                if file.write(data) < len(data):
                    raise OSError("no room for a whole line")

    @contextlib.contextmanager
    def phase(self, name: str, timed: bool = False):
        """Write how long the body took. timed: it was on the clock."""
        began = time.perf_counter()
        yield
        ms = (time.perf_counter() - began) * 1000
        self.event("phase", name=name, ms=round(ms, 3), timed=timed)
        self.text(f"phase {name}: {ms / 1000:.2f} s{' (on the clock)' if timed else ''}")

    def step(self, losses: Losses, ms: float):
        """Count one more step. ms is host time: on a GPU the step is launched, not finished."""
        self.done += 1
        self.tokens += losses.tokens * self.fabric.world
        fields = dict(step=self.done, train_time_ms=round(ms, 3), tokens=self.tokens)
        if self.schedule.cfg.time_budget:
            place = self.schedule.place(self.done - 1)
            fields["place"] = place
            self.total = round(self.schedule.total_steps * self.done / max(place, 1))
        # On a GPU the copy comes after the step; by the time it is looked at, the device is a cycle further.
        sums = losses.slot_sums
        copied = None
        if sums.is_cuda:
            sums = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
            copied = torch.cuda.current_stream().record_event()
        self.pending.append((fields, sums, losses.tokens, copied))
        self.flush(keep=self.schedule.cfg.adam_every)

    def flush(self, keep: int = 0):
        """Write pending lines but for the last `keep` steps'. Raises RunError on a loss that is not finite."""
        while len(self.pending) > keep:
            fields, sums, tokens, copied = self.pending.pop(0)
            if copied is not None:
                copied.synchronize()                                          # NCCL's watchdog bounds it
            loss = float(sums.sum()) / tokens
            step, ms = fields["step"], fields["train_time_ms"]
            self.check(loss, f"training loss of step {step - 1}")
            self.event("step", **fields, train_loss=loss)
            line = f"step:{step}/{self.total} train_time:{ms:.0f}ms step_avg:{ms / step:.2f}ms"
            self._write("log.txt", (line + "\n").encode())
            # The console gets a selection, with more for people.
            seconds_left = (min(self.total, self.schedule.end_step) - step) * ms / step / 1000
            more = f"{seconds_left:.0f} s left, train_loss:{loss:.3f} (sum over predicted tokens)"
            self.show(f"step:{step}/{self.total} {more}")
            if not self.on_terminal and step % -(-self.total // PLAIN_LINES) == 0:
                self.fabric.say(f"{line} {more}")

    def check(self, loss: float, what: str):
        need(math.isfinite(loss), what, loss, f"a finite number (last good validation: {self.last_good})", "lower "
             "--adam_lr and --normuon_lr; --dtype=float32 --head=plain shows if it is an overflow", RunError)

    def validation(self, loss: float, ms: float, data: ValidationSet):
        """Write the loss after the steps done so far. Raises RunError if it is not finite."""
        self.flush()
        self.check(loss, f"validation loss at step {self.done}")
        self.last_good = f"{loss:.4f} at step {self.done}"
        self.event("val", step=self.done, val_loss=loss, train_time_ms=round(ms, 3), **data.text_losses(loss))
        self.text(f"step:{self.done}/{self.total} val_loss:{loss:.4f} train_time:{ms:.0f}ms "
                  f"step_avg:{ms / max(self.done, 1):.2f}ms")

    def aborted(self, cause: str):
        """Write the last lines of a run that did not finish; no other thread writes after them. Never raises."""
        # The main thread may still be in a step: whatever it writes from here on goes nowhere.
        files, self.files = self.files, {}
        last = {"log.txt": f"aborted after step {self.done}: {' '.join(cause.split())}\n",
                "log.jsonl": json.dumps(dict(type="aborted", step=self.done, cause=cause)) + "\n"}
        for name, file in files.items():
            with contextlib.suppress(Exception):
                file.write(last[name].encode("utf-8", "replace"))

    def close(self):
        for file in self.files.values():
            file.close()
        self.files = {}
        self.show("")

def train_step(executor: Executor, loader: Loader, values: Values) -> Losses:
    losses = executor.forward_backward(loader.next(values), values)
    executor.optim_step(values, loader.plans_ahead)
    return losses

def warm_up(cfg: Config, fabric: Fabric, executor: Executor, log: Log):
    """Run every graph the race will need, the largest stage first, on tokens from a formula; then restore the state."""
    # Enough tokens for whatever a cycle of a stage reads. A rank that compiles keeps the others waiting for minutes.
    restore = executor.snapshot()
    cfg = replace(cfg, epochs=0, time_budget=0, val_tokens=cfg.val_batch_tokens,
                  comm_timeout=LONG_PATIENCE * cfg.comm_timeout)
    most_tokens = cfg.val_batch_tokens + max(stage.batch_tokens for stage in cfg.stages)
    tokens = 4 * most_tokens * (1 + 2 * FORMULA_DOCUMENT // cfg.max_doc_len)  # long documents are cut to max_doc_len
    headers = [ShardHeader(f"{FORMULA}warm-up#0", tokens, cfg.vocab_size, cfg.document_start)]
    validation = ValidationSet(cfg, fabric, headers, executor.exchange, "warm-up")
    schedule = Schedule(cfg)
    steps = [schedule.at(step) for step in schedule.warm_up_steps()]
    cycles = [steps[first:first + schedule.cycle] for first in range(0, len(steps), schedule.cycle)]
    loader = Loader(cfg, fabric, headers, cycles, executor.exchange_ahead, "warm-up")
    loader.start()

    # One phase a cycle, so that a slow compiler is seen at work.
    for cycle in cycles:
        with log.phase(f"warm-up of stage {cycle[-1].stage + 1}"):
            for values in cycle:
                train_step(executor, loader, values)
    with log.phase("warm-up of validation"):
        # Attention's spans differ by stage, and once more at the end.
        last_of_stage = {values.stage: values for values in steps}
        for values in (*last_of_stage.values(), schedule.at(schedule.end_step)):
            executor.evaluate(validation.batches(values), values)
    loader.close()
    restore()

def cycles_from(first: int, schedule: Schedule, clock: Clock):
    """Yield the Values of each cycle from step `first` on; runs on the loader's thread, a cycle ahead of the race."""
    # With a time budget the clock of rank 0 decides a cycle's place in the plan. Its share of the plan is the share of
    # the budget that will be over when the cycle begins, if the cycle before it takes as long as the last.
    budget = 1000 * schedule.cfg.time_budget                  # ms
    before = clock.ms
    for step in itertools.count(first, schedule.cycle):
        if budget and len(schedule.places) <= step // schedule.cycle:
            # Every rank has to be at the same place, and places of a resumed run are known.
            now = clock.ms
            place = torch.tensor((2 * now - before) / budget * schedule.total_steps, dtype=torch.float64)
            before = now
            if clock.fabric.world > 1:
                dist.broadcast(place, 0, group=clock.fabric.plan_group)
            schedule.places.append(max([float(place), *schedule.places[-1:]]))
        if step >= schedule.end_step:
            return
        yield [schedule.at(at) for at in range(step, min(step + schedule.cycle, schedule.end_step))]

def race(loader: Loader, executor: Executor, validation: ValidationSet, clock: Clock, log: Log, before_step: Callable):
    """Train against the clock; return the final validation loss (nats per token), and why the data ended early."""
    # On the clock: reading, packing, also of the first batch, plans, steps, logging. Off the clock: validation, and
    # what before_step(step) stops it for.
    schedule = log.schedule
    data_ended = None
    clock.start()
    with log.phase("first batch", timed=True):
        loader.start()
        loader.wait()
    try:
        while log.done < schedule.end_step:
            before_step(log.done)
            values = schedule.at(log.done)
            if values.validate:
                clock.stop()
                log.validation(executor.evaluate(validation.batches(values), values), clock.ms, validation)
                clock.start()
            losses = train_step(executor, loader, values)
            log.step(losses, clock.ms)
    except DataEnded as error:                                                # what was trained counts
        data_ended = error
    clock.stop()

    # Only now a budget's number of steps is known; and only at the true end the long window is wider.
    log.flush()
    if schedule.cfg.time_budget:
        log.total = log.done
        log.event("budget", seconds=schedule.cfg.time_budget, steps=log.done)
    end = schedule.at(log.done)
    with log.phase("evaluation"):
        loss = executor.evaluate(validation.batches(end), end)
    log.validation(loss, clock.ms, validation)
    return loss, data_ended

def generate(cfg: Config, executor: Executor, values: Values, pieces: list[bytes] | None,
             prompt=()):
    """Return up to sample_tokens tokens after a document start and the prompt, as text or, without pieces, as ids."""
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = [cfg.document_start, *prompt]
    for _ in range(cfg.sample_tokens):
        # Columns after the vocabulary are padding, which is never drawn.
        logits = executor.next_logits(tokens, values)[:cfg.vocab_size].float().cpu()
        need(logits.isfinite().all(), "sample", "logits that are not finite", "weights of a run that ended well",
             "sample from another save, or train again at a lower learning rate", RunError)

        probability = torch.softmax(logits / cfg.temperature, 0)
        drawn = torch.multinomial(probability, 1, generator=generator)
        token = min(executor.fabric.gather(int(drawn)))                       # one text, however each rank rounds
        if token == cfg.document_start:
            break
        tokens.append(token)
    tokens = tokens[1 + len(prompt):]
    if not pieces:
        return "token ids (no vocab.txt beside them): " + " ".join(map(str, tokens))
    return b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")


# ====== Room 10: Main =================================================================================================
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STORE_PATIENCE = 2.0                     # s for the store at which ranks met to say whether another one ended first
OTHERS_PATIENCE = 1.0                    # s for all ranks to hear of a signal that is meant for all
END_PATIENCE = 5.0                       # s that an end may take
LOST_CONNECTION = r"(?i)connection (closed|reset|refused)|timed? ?out|broken pipe|socket|gloo|nccl"
KEPT_CHECKPOINTS = 2
BUSY_CORES = 0.3                         # that work for others, and are worth a word
POCKET_PIECE = re.compile(rb"\n\s*| ?\w+| ?[^\s\w]|\s+")    # as in data/pocket.py
FALLBACK = "save"                        # folder in the run directory, of weights that --save could not take

def within(seconds, call):
    """Return what the call returns. Raises TimeoutError when it takes longer; its thread is left running."""
    return ThreadPoolExecutor(1).submit(call).result(seconds)

def make_fabric(cfg: Config) -> Fabric:
    """Pick the device and join the process groups that torchrun describes. Raises ConfigError."""
    # The launch: each rank has to know all of it, or would train alone beside the others.
    env = os.environ
    defaults = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    given = {name: env.get(name, text) for name, text in defaults.items()}
    rank, local_rank, world, local_world = (int(text) if text.isdecimal() else -1 for text in given.values())
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 and name not in env]
    tasks = env.get("SLURM_NTASKS", "1")
    need(0 <= rank < world and local_rank >= 0 and not missing, "launch", f"{given} without {missing}", "all that "
         "torchrun sets, with 0 <= RANK < WORLD_SIZE", f"torchrun --standalone --nproc_per_node={max(world, 1)} "
         "train_gpt.py ..., or unset WORLD_SIZE for a single process")
    need("WORLD_SIZE" in env or tasks == "1", "launch", f"{tasks} tasks of Slurm, and no WORLD_SIZE", "ranks that know "
         "each other", "srun ... torchrun ..., one task a node; or set WORLD_SIZE=1, for each task to train alone")
    usable = max(w for w in range(1, min(world, cfg.num_slots) + 1) if cfg.num_slots % w == 0)
    need(usable == world, "number of ranks", world, f"a divisor of num_slots={cfg.num_slots}",
         f"torchrun --nproc_per_node={usable} train_gpt.py ...")

    # The device: a GPU for each rank, or the CPU for all.
    cuda = cfg.device != "cpu" and torch.cuda.is_available()
    gpus = torch.cuda.device_count()
    need(cuda or cfg.device != "cuda", "--device=cuda, which the record preset sets", "no CUDA device",
         "an NVIDIA GPU and torch for CUDA", "--preset=pocket trains on a CPU in about two minutes")
    need(not cuda or max(local_rank + 1, local_world) <= gpus, "more ranks than devices",
         f"{local_world} ranks, {gpus} GPUs", "one GPU for each rank", f"--nproc_per_node={gpus} for torchrun")
    fabric = Fabric(torch.device("cuda", local_rank) if cuda else torch.device("cpu"), rank, world)
    fabric.enter_thread()
    # glibc would give memory back after each step, and get it again page by page with a fault for each.
    if not cuda and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1)                                                  # M_TRIM_THRESHOLD of malloc.h: never
        libc.mallopt(-3, 32 << 20)       # M_MMAP_THRESHOLD: the most bytes of a block that every glibc takes for it
    if world == 1:
        return fabric

    # The ranks meet. In a thread, since torch itself waits for ever for a port that accepts and says nothing.
    def join():
        patience = timedelta(seconds=cfg.comm_timeout)
        fabric.enter_thread()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=patience)
        return dist.new_group(backend="gloo", timeout=patience)

    try:
        return replace(fabric, plan_group=within(cfg.comm_timeout + 1, join))
    except (RuntimeError, ValueError, TimeoutError) as error:
        answer = str(error)[:200] or "nothing that answers as a store of ranks does"
        raise ConfigError("waiting for all ranks", f"at {env['MASTER_ADDR']}:{env['MASTER_PORT']}: {answer}",
                          f"{world} ranks in {cfg.comm_timeout} s",
                          "see that every rank starts; look at MASTER_ADDR and MASTER_PORT") from None

def head_precision(cfg: Config, fabric: Fabric):
    """Return the precision of the head: --head, with auto resolved. Raises ConfigError for fp8 without such a GPU."""
    fits = cfg.dtype == "bfloat16" and cfg.model_dim % FP8_UNIT == cfg.padded_vocab % FP8_UNIT == 0
    native = fits and fabric.on_cuda and torch.cuda.get_device_capability(fabric.device) >= (8, 9)
    need(native or cfg.head != "fp8", "--head=fp8", f"{cfg.dtype} on {hardware(fabric)}",
         "bfloat16 on CUDA capability 8.9 and up", "--head=auto or plain, or --head=emulated for the same numbers")
    if cfg.head == "auto":
        return "fp8" if native else "plain"
    return cfg.head

# Kernels behind torch's variable-length call by the GPU's major capability, tried in this order; and their packages.
ATTENTION_BY_CARD = {9: ("FA4", "FA3", "varlen"), 10: ("FA4", "varlen")}
ATTENTION_PACKAGES = {"FA4": "flash-attn-4", "FA3": "flash-attn-3", "varlen": "torch"}
# A kernel is checked with documents that end inside tiles of 128 and inside windows, empty ones, and one of one token.
CHECKED_BOUNDS = (0, 0, 150, 151, 420, 420, 700)
CHECKED_WINDOWS = (2, 128, 300, 1000)    # the last is longer than any document
CHECKED_SPREAD = 4.0                     # of the logits: so large that one key too many or too few shows

def check_attention(cfg: Config, device: torch.device):
    """Raise AssertionError unless outputs and gradients agree with the reference to the dtype's rounding."""
    dtype = getattr(torch, cfg.dtype)
    generator = torch.Generator(device).manual_seed(0)
    bounds = torch.tensor(CHECKED_BOUNDS, device=device, dtype=torch.int32)
    # The layouts of plain layers, and of paired ones: twice the positions, half the heads.
    for window, (per_token, heads) in itertools.product(CHECKED_WINDOWS, ((1, 2), (2, 1))):
        positions = per_token * CHECKED_BOUNDS[-1]
        inputs = torch.randn(4, positions, heads, cfg.head_dim, device=device, generator=generator).to(dtype)
        span = AttentionSpan(positions, window, CHECKED_SPREAD / cfg.head_dim**0.5)
        results = []
        for attend, given in ((attention_varlen, inputs), (attention_reference, inputs.float())):
            *qkv, grad = (x.clone().requires_grad_() for x in given)
            out = attend(*qkv, per_token * bounds, span)
            results.append((out.detach(), *torch.autograd.grad(out, qkv, grad)))
        for found, exact in zip(*results):
            most = 8 * torch.finfo(dtype).eps * float(exact.abs().max())
            torch.testing.assert_close(
                found.float(), exact, rtol=0, atol=most,
                msg=f"its output or a gradient is off by more than {most:.1e}, window {window}, {heads} heads")

def version_of(package):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None

def choose_attention(cfg: Config, fabric: Fabric):
    """Return the first kernel that all ranks find equal to the reference, and its name. Raises ConfigError."""
    if cfg.attention == "reference" or (cfg.attention == "auto" and not fabric.on_cuda):
        return attention_reference, "reference"
    names = (cfg.attention,)
    if cfg.attention == "auto":
        capability, _ = torch.cuda.get_device_capability(fabric.device)
        names = ATTENTION_BY_CARD.get(capability, ("varlen",))

    # All ranks take the same kernel: ranks with different ones would not train the same model.
    refusal = ""
    for name in names:
        why = ""
        try:
            if name in ("FA4", "FA3"):
                torch.nn.attention.activate_flash_attention_impl(name)
            elif torch.nn.attention.current_flash_attention_impl():
                torch.nn.attention.restore_flash_attention_impl()
            check_attention(cfg, fabric.device)
        except Exception as error:                                            # whatever a foreign kernel raises
            why = f"{type(error).__name__} {str(error)[:100]}"
        refusal = next((f"{why} (rank {rank})" for rank, why in enumerate(fabric.gather(why)) if why), "")
        if not refusal:
            package = ATTENTION_PACKAGES[name]
            return attention_varlen, f"{name} ({package} {version_of(package)})"
        fabric.say(f"attention: {name} does not run here: {refusal}; requirements-gpu.txt names packages")
    need(cfg.attention == "auto" and not cfg.preset.startswith("record"),
         f"--attention={cfg.attention} of preset {cfg.preset}", refusal, "a kernel that runs and agrees with the "
         "reference", "pip install -r requirements-gpu.txt, or --attention=reference, whose time and memory grow with "
         "the windows")
    fabric.say("attention: NO FAST KERNEL: the reference is slower by far; its memory grows with the windows")
    return attention_reference, "reference"

def hardware(fabric: Fabric):
    if fabric.on_cuda:
        return f"{torch.cuda.get_device_name(fabric.device)} x {fabric.world}"
    name = platform.machine()
    with contextlib.suppress(OSError, TypeError):
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"

def seconds_of_others(fabric: Fabric):
    """Return s of this machine's cores that other processes have used so far; negative where it does not say.
    Collective."""
    busy = 0.0
    with contextlib.suppress(OSError):
        ticks = Path("/proc/stat").read_text().split()[1:4]                   # user, nice, system
        busy = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return busy - sum(fabric.gather(time.process_time()))

def write_header(log: Log, given: Config, executor: Executor, attention: str, decisive: dict, resumed: dict):
    """Write the first lines of a run: settings, versions, hardware, sizes. given: as flags and preset say.
    resumed: what `check_resumed` returns; {} for a new run."""
    # What another needs to repeat the run: flags, commit, versions.
    cfg = log.schedule.cfg
    fabric = log.fabric
    of_preset = vars(make_config(dict(preset=cfg.preset)))
    changed = {name: flag_text(value) for name, value in vars(replace(given, seed=cfg.seed, run_dir="")).items()
               if value != of_preset[name]}
    config = {name: [row._asdict() for row in value] if isinstance(value, tuple) else value
              for name, value in vars(cfg).items()}
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    # All parameters, and those that one token uses: of a table only the rows that it looks up.
    tables = row_tables(cfg)
    table_rows = {table.label: table.rows for table in tables}
    params_total = sum(math.prod(row.shape) for row in parameter_table(cfg))
    rows_unread = sum(table.rows - table.reads for table in tables)
    facts = dict(
        preset=cfg.preset, started=time.strftime("%Y-%m-%dT%H:%M:%S"), changed=changed, config=config, seed=cfg.seed,
        python=platform.python_version(), torch=torch.__version__, triton=version_of("triton"),
        cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())) if fabric.on_cuda else None,
        git_commit=commit, source_sha256=decisive["source_sha256"], data_sha256=decisive["data_sha256"],
        hardware=hardware(fabric), world_size=fabric.world, attention=attention, head=executor.precision,
        grad_accum_steps=-(-cfg.num_slots // fabric.world // executor.slots_at_once),
        untimed_warmup_steps=len(Schedule(replace(cfg, time_budget=0.0)).warm_up_steps()), target_loss=cfg.target_loss,
        params_total=params_total, params_per_token=params_total - cfg.model_dim * rows_unread, table_rows=table_rows,
        table_bytes=sum(table_rows.values()) * cfg.model_dim * getattr(torch, cfg.dtype).itemsize)
    log.event("resumed" if resumed else "header", **facts, **resumed)
    changes = ", ".join(f"{name}={text}" for name, text in changed.items())
    for line in (
            "=" * 100,
            f"Running Python {facts['python']}",
            f"Running PyTorch {facts['torch']} compiled for CUDA {facts['cuda'] or 'none'} on {facts['hardware']} "
            f"with world_size {fabric.world}",
            f"preset {cfg.preset}, {params_total:,} parameters in {cfg.dtype}, attention kernel {attention}, products "
            f"of the head in {executor.precision} precision, seed {cfg.seed}",
            f"changed from the preset: {changes or 'nothing'}",
            "=" * 100,
            f"logs in {log.run_dir}"):
        log.text(line)
    if resumed:
        log.text(f"goes on after step {log.done} of {resumed['source']}, whose lines stand above in the log")
        for name, (then, now) in resumed["differs"].items():
            log.text(f"resumed with another {name}: {then} then, {now} now")

def open_data(given: Config, fabric: Fabric, source: bytes):
    """Check every shard. Returns the config with all sizes, headers of the shards to train and to validate with, and
    what decides a run's numbers: {flag or fact: text}, with hashes of data and source. Raises TrainerError."""
    train_shards = find_shards(given.train_files)
    val_shards = find_shards(given.val_files)
    content = dict(data_sha256=scan_shards(train_shards + val_shards), torch=str(torch.__version__),
                   source_sha256=hashlib.sha256(source).hexdigest())
    fabric.check_agreement({f"--{name}": flag_text(value) for name, value in vars(given).items()} | content)
    cfg = resolve(given, train_shards, val_shards)
    check_enough_data(cfg, Schedule(cfg), train_shards, val_shards)
    # Links are followed: it is the same text under any name.
    validated = {os.path.realpath(header.name) for header in val_shards}
    shared = validated.intersection(os.path.realpath(header.name) for header in train_shards)
    if shared:
        fabric.say(f"trained on and validated with, at least: {min(shared)}; the validation losses say nothing about "
                   "other text")
    return cfg, train_shards, val_shards, decisive_settings(given) | content

def check_start(cfg: Config, run_id: str, folders: list[Path], fabric: Fabric):
    """Refuse what would end a run hours later: taken names, no place to save, no compiler. Raises TrainerError."""
    with fabric.failing_together():
        compiles = cfg.compile == 1 or (cfg.compile and fabric.on_cuda)
        compilers = (os.environ.get("CXX", "g++"), os.environ.get("CC", "gcc"), "clang")
        need(not compiles or any(map(shutil.which, compilers)), "--compile", "no C++ compiler", "g++ or another that "
             "torch.compile finds", "install one (apt install g++), or --compile=0")
        if fabric.rank > 0:
            return

        for folder in folders:
            need(not any(os.path.lexists(folder / name) for name in LOGS), f"run directory {folder}", "the log of a "
                 "run", "a folder without one", "another --run_dir, or remove what an earlier start has left", RunError)
        if cfg.save:
            folder = Path(cfg.save)
            need(not os.path.lexists(folder), f"--save={cfg.save}", "a name that is taken", "a free name",
                 "another name; nothing is overwritten")
            with refused(folder, ConfigError):
                part_of(folder, run_id).mkdir(parents=True)
                part_of(folder, run_id).rmdir()

def check_resumed(cfg: Config, earlier: dict, facts: dict, end_step: float):
    """Return dict(step, source, differs). differs: facts that have changed since the checkpoint, name -> (then, now).
    Raises DataError if the data differ, ConfigError if that run is past the end of this one."""
    before = earlier["facts"]
    need(before["data_sha256"] == facts["data_sha256"], f"data to resume {cfg.resume} with",
         f"shards of hash {facts['data_sha256'][:16]}...", f"those of the run, of hash {before['data_sha256'][:16]}...",
         "leave --train_files and --val_files out, or name the same shards in another place", DataError)
    done = earlier["log"]["done"]
    need(done <= end_step, f"--max_steps with --resume={cfg.resume}", f"{cfg.max_steps}: the run would end at step "
         f"{end_step}", f"{done} or more: the run is there already", "--max_steps=0, for the whole schedule")
    differs = {name: (before.get(name), facts.get(name)) for name in before | facts
               if before.get(name) != facts.get(name)}
    return dict(step=done, source=cfg.resume, differs=differs)

def write_checkpoint(run_dir: Path, run_id: str, content: dict, executor: Executor, values: Values):
    """Write what the run needs to go on before the step of these values, and keep the last two. Collective."""
    # A checkpoint that cannot be written ends nothing: the next may be.
    fabric = executor.fabric
    folder = run_dir / CHECKPOINTS
    name = f"step-{values.step:07d}"
    files = {"run.pt": dict(content, state=executor.whole_state(values))}
    try:
        write_folder(folder / name, run_id, files, executor)
    except RunError as error:
        fabric.say(f"{error}\nthe run goes on without this checkpoint")
        return
    if fabric.rank == 0:
        before = sorted(path for path in folder.glob("step-???????") if path.name < name)
        for old in before[:1 - KEPT_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)

def finish(log: Log, run_id: str, executor: Executor, validation: ValidationSet, ms: float, loss: float, graphs: int):
    """Write the last lines of a run's log, and the weights. graphs: how many were compiled before the race. Collective.
    Returns the result, and the error of --save or None."""
    cfg = log.schedule.cfg
    fabric = log.fabric
    if fabric.on_cuda:                                                        # since the race began
        peak = dict(allocated=torch.cuda.max_memory_allocated() >> 20, reserved=torch.cuda.max_memory_reserved() >> 20)
    else:                                                                     # of the process; KiB, on macOS bytes
        unit = 20 if sys.platform == "darwin" else 10
        peak = dict(consumption=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> unit)
    result = dict(val_loss=loss, train_time_ms=round(ms, 3), steps=log.done, tokens=log.tokens, peak_memory_mib=peak,
                  run_dir=str(log.run_dir), **validation.text_losses(loss))
    if validation.bytes_per_token:
        log.text(f"validation loss {loss:.4f} nats per token = {result['val_bpb']:.4f} bits per byte; unigram entropy "
                 f"{validation.unigram_nats:.4f} nats, ratio {loss / validation.unigram_nats:.4f}")

    # Facts without which the training time would mislead.
    recompiled = sum(fabric.gather(torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs))
    if recompiled:
        result["recompiles"] = recompiled
        log.text(f"{recompiled} graphs were compiled in the race, on its clock: TORCH_LOGS=recompiles says why")
    if cfg.profile:
        result["void"] = "profiled"
    elif log.done < log.schedule.end_step:
        result["void"] = "the data ended early"
    if "void" in result:
        log.text(f"this time does not count: {result['void']}")
    if cfg.time_budget:
        result["budget_s"] = cfg.time_budget
    log.text(f"training time {ms / 1000:.2f} s, {log.done} steps, {log.tokens:,} tokens")
    log.text("peak memory " + " ".join(f"{kind}: {mib} MiB" for kind, mib in peak.items()))

    result["comms"] = executor.traffic()
    touched = {label: sum(fabric.gather(sum(map(len, table.home.touched_places()))))
               for label, table in executor.tables.items() if table.home}
    if touched:
        result["touched_rows"] = touched

    # Weights go where --save says, else into the run directory.
    failure = None
    fate = "lost"
    for folder in (Path(cfg.save), log.run_dir / FALLBACK) if cfg.save else ():
        try:
            save(folder, run_id, cfg, executor, log.schedule.at(log.done), validation.vocabulary)
            fate = f"in {folder}"
            break
        except RunError as error:
            failure = failure or error
    if cfg.save:
        log.text(f"weights {fate}")
    log.event("result", **result)
    log.close()
    return result, failure

def report(log: Log, executor: Executor, validation: ValidationSet, results: list[dict]):
    """Print a sample, and as the last line on stdout a JSON object with means over the runs. Raises RunError."""
    cfg = log.schedule.cfg
    if cfg.sample_tokens:
        sample = generate(cfg, executor, log.schedule.at(log.done), validation.vocabulary)
        executor.fabric.say(f"{' sample ':-^100}\n{sample}\n{'-' * 100}")
    loss, ms = np.mean([(result["val_loss"], result["train_time_ms"]) for result in results], 0).tolist()
    last = dict(type="result", val_loss=loss, train_time_ms=ms, run_dirs=[result["run_dir"] for result in results])
    if executor.fabric.rank == 0:
        print_result(json.dumps(last))

def make_profile(cfg: Config, first: int, end_step: float):
    """Return a profiler for the steps of --profile in a run from step `first` on, or None. Raises ConfigError."""
    if not cfg.profile:
        return None
    start, stop = map(int, cfg.profile.split(":"))
    need(first < start and stop < end_step, f"--profile={cfg.profile}", f"steps {first} to {end_step}",
         f"{first} < a < b < {end_step}: it warms up in the step before a, and the one after ends the trace",
         f"--profile={first + 1}:{first + 3}")
    traced = torch.profiler.schedule(skip_first=start - first - 1, wait=0, warmup=1, active=stop - start, repeat=1)
    return torch.profiler.profile(schedule=traced)

def train(given: Config, fabric: Fabric, ending: Ending, source: bytes):
    """Set up and warm up once, then train once or several times: the whole run in the order in which it happens."""
    # What would end the run after hours of work is looked at first, before data are read and anything is written.
    began = time.perf_counter()
    before = seconds_of_others(fabric)
    run_id = fabric.gather(os.urandom(4).hex())[0]
    # Each rank would have a time of its own.
    root = Path(fabric.gather(given.run_dir or f"logs/{time.strftime('%Y%m%d-%H%M%S')}-{given.preset}-{run_id}")[0])
    seeds = range(given.seed, given.seed + given.runs)
    folders = [root / f"seed_{seed}" if given.runs > 1 else root for seed in seeds]
    check_start(given, run_id, folders, fabric)

    # Data come before the model: their headers decide sizes, and nothing is worth building on bad ones.
    cfg, train_shards, val_shards, decisive = open_data(given, fabric, source)
    precision = head_precision(cfg, fabric)

    # Memory depends on the attention kernel, and slots at once on memory. Packages may compile now: be patient.
    fabric.set_timeout(cfg.comm_timeout * LONG_PATIENCE)
    kernel, attention = choose_attention(cfg, fabric)
    slots_at_once, estimate = fit_memory(cfg, fabric, kernel)
    executor = Executor(cfg, fabric, kernel, precision, slots_at_once,
                        report=lambda **traffic: ending.log.event("comms", **traffic))


    # A resumed run goes on with the state, log, clock and places of its last checkpoint.
    earlier = dict(log=NEW_LOG, places=(), train_time_ms=0.0)
    if cfg.resume:
        earlier = load_checkpoint(Path(cfg.resume), executor)
    schedule = Schedule(cfg, earlier["places"])
    resumed = check_resumed(cfg, earlier, decisive, schedule.end_step) if cfg.resume else {}
    first = earlier["log"]["done"]
    profile = make_profile(cfg, first, schedule.end_step)

    # Each run has a log of its own, which the process closes however it ends.
    def open_log(folder: Path):
        settings = settings_json(replace(given, seed=cfg.seed, slots_per_micro_batch=slots_at_once))
        beside = {Path(__file__).name: source, SETTINGS: settings}
        log = ending.log = Log(folder, fabric, schedule, beside, earlier["log"])
        write_header(log, given, executor, attention, decisive, resumed)
        return log

    # Set-up and warm-up stand in the log of the first run.
    seconds = time.perf_counter() - began
    busy = (seconds_of_others(fabric) - before) / seconds
    log = open_log(folders[0])
    if busy > BUSY_CORES:
        log.text(f"{busy:.1f} of {os.cpu_count()} cores work for others: the time will mean little")
    log.text("estimated memory: " + ", ".join(f"{part} {size / 2**20:,.0f} MiB" for part, size in estimate.items()))
    log.event("phase", name="set-up", ms=round(1000 * seconds, 3), timed=False)

    # Warm-up compiles and runs every graph, and leaves no trace; only then is a silent rank a dead one.
    with log.phase("validation data"):
        validation = ValidationSet(cfg, fabric, val_shards, executor.exchange)
    with log.phase("warm-up"):
        warm_up(cfg, fabric, executor, log)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if executor.compiling:
        log.event("compiled", graphs=graphs)
    if not cfg.checkpoint_every and not cfg.save:                             # else all wait for the slowest disk
        fabric.set_timeout(cfg.comm_timeout)

    restore = executor.snapshot() if cfg.runs > 1 else do_nothing
    results = []
    problem = None
    for seed, folder in zip(seeds, folders):
        # Further runs start from the same state, but with initial values of their own seed.
        if results:
            cfg = replace(cfg, seed=seed)
            schedule = Schedule(cfg)
            log = open_log(folder)
            with log.phase("reset"):
                restore()
                executor.set_seed(seed)

        # Checkpoints are off the clock; a profile counts steps.
        clock = Clock(fabric, earlier["train_time_ms"])
        loader = Loader(cfg, fabric, train_shards, cycles_from(first, schedule, clock), executor.exchange_ahead)
        loader.skip(map(schedule.at, range(first)))

        def before_step(step: int):
            if step == first:
                return
            if cfg.checkpoint_every and step % schedule.cycle == 0 and step % cfg.checkpoint_every < schedule.cycle:
                clock.stop()
                with log.phase("checkpoint"):
                    content = dict(log=log.state(), train_time_ms=clock.ms, places=schedule.places,
                                   facts=decisive | dict(seed=str(seed)))
                    write_checkpoint(log.run_dir, run_id, content, executor, schedule.at(step))
                clock.start()
            if profile:
                profile.step()

        # The garbage collector passes over all that is there now: models and graphs are many objects.
        gc.collect()
        gc.freeze()
        if fabric.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        with profile or contextlib.nullcontext():
            loss, data_ended = race(loader, executor, validation, clock, log, before_step)
        gc.unfreeze()
        loader.close()
        if profile and profile.profiler:                                      # else the run ended before those steps
            # Each rank writes a trace; a table of the dearest operations goes into the log.
            trace = log.run_dir / f"trace_rank{fabric.rank}.json.gz"
            with refused(trace):
                profile.export_chrome_trace(str(trace))
            sort_by = f"self_{fabric.device.type}_time_total"
            log.text(profile.key_averages().table(sort_by, 12, max_name_column_width=60))

        # The result is the last line of a log: after it only the sample can fail.
        result, failure = finish(log, run_id, executor, validation, clock.ms, loss, graphs)
        results.append(result)
        problem = problem or data_ended or failure

    report(log, executor, validation, results)
    if problem:
        raise problem


def sample_saved(flags: Config):
    """Do --sample=DIR "prompt": print text that goes on from the prompt, on any device. Raises TrainerError."""
    # Settings come first: they say what the tensors have to be.
    folder = Path(flags.sample)
    weights = folder / "weights.pt"
    saved = read_settings(folder)
    check_manifest(folder / SETTINGS, (folder / SETTINGS).read_bytes())
    manifest = read_manifest(folder)
    tensors = read_tensors(weights, manifest)
    check_tensors(weights, saved, tensors)

    # One rank on any device, without compiler and optimizer; rows of tables stay on the host, where a prompt needs few.
    fabric = make_fabric(replace(saved, num_slots=1, device=flags.device))
    dtype = saved.dtype
    if dtype == "bfloat16" and not fabric.on_cuda:
        dtype = "float32"
    tables = tuple(table._replace(home="host") for table in saved.tables)
    cfg = replace(saved, compile=0, dtype=dtype, seed=flags.seed, sample_tokens=flags.sample_tokens,
                  temperature=flags.temperature, tables=tables, time_budget=0.0, max_steps=0)
    pieces = read_vocabulary(folder, cfg)
    try:
        if pieces is None and cfg.vocab_size == GPT2_VOCAB:
            encoding = importlib.import_module("tiktoken").get_encoding("gpt2")
            pieces = [encoding.decode_single_token_bytes(token) for token in range(GPT2_DOCUMENT_START)] + [b""]
            prompt = encoding.encode_ordinary(flags.prompt)
        else:
            # Split as data/pocket.py splits its text: known pieces, and single bytes for the rest.
            ids = {piece: token for token, piece in enumerate(pieces or ()) if piece}
            words = POCKET_PIECE.findall(flags.prompt.encode("utf-8", "surrogateescape"))
            known = [[word] if word in ids else [bytes((byte,)) for byte in word] for word in words]
            prompt = [ids[piece] for piece in itertools.chain(*known)]
    except Exception as error:           # no package, no network, bytes that no token has
        raise DataError("prompt", f"{type(error).__name__}: {error}", "bytes of a vocab.txt beside the weights, or "
                        "GPT-2 tokens by tiktoken, which has them from the network or from TIKTOKEN_CACHE_DIR",
                        "leave it out, use other words, or install tiktoken") from None
    executor = Executor(cfg, fabric, attention_reference, precision=None)
    with damaged(weights):
        executor.model.load_state_dict(tensors)
    load_rows(folder, manifest, executor)

    schedule = Schedule(cfg)
    sample = generate(cfg, executor, schedule.at(schedule.end_step), pieces, prompt)
    print_result(f"{' prompt ':-^100}\n{flags.prompt}\n{' sample ':-^100}\n{sample}")

def describe(error: BaseException | signal.Signals):
    """Return (exit status, what to tell the user) for what ended the run. A bug keeps its traceback."""
    if isinstance(error, signal.Signals):
        return 128 + error, "interrupted" if error == signal.SIGINT else f"ended from outside ({error.name})"
    first_line = str(error).partition("\n")[0]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in first_line:
        error = RunError("out of memory", first_line, "less at once", "--slots_per_micro_batch=1, or more --num_slots")
    elif isinstance(error, OSError):
        error = DataError(str(error.filename or "disk"), error.strerror, "a file to use", "look at disk and rights")
    elif isinstance(error, RuntimeError) and dist.is_initialized() and re.search(LOST_CONNECTION, first_line):
        error = lost_rank(first_line)
    if isinstance(error, TrainerError):
        return error.status, f"{type(error).__name__}: {error}"
    return 1, "".join(traceback.format_exception(error))

def lost_rank(found: str):
    return RunError("lost another rank", found, "every rank's answer within --comm_timeout", "look for the end of the "
                    "other ranks: killed (dmesg tells of the out-of-memory killer), or stuck; torchrun names the first")

def first_cause(cause: str, alone: str):
    """Agree with the other ranks on what ended the run first. Returns it, and whether this rank prints it.
    alone: takes the place of the cause unless all ranks end within OTHERS_PATIENCE."""
    env = os.environ
    restart = f"restart {env.get('TORCHELASTIC_RESTART_COUNT')}"
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=timedelta(seconds=STORE_PATIENCE))
    store.add(f"ended ranks, {restart}", 1)

    def all_ended():
        deadline = time.monotonic() + OTHERS_PATIENCE
        while store.add(f"ended ranks, {restart}", 0) < int(env["WORLD_SIZE"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    if cause != alone and not all_ended():
        cause = alone
    my_cause = f"{env['RANK']}\n{cause}"
    first = store.compare_set(f"first cause, {restart}", "", my_cause).decode()
    if env["RANK"] == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        all_ended()                                                           # the store ends with this process
    return first.partition("\n")[2], first == my_cause

class Ending:
    """The one end of this process, by an error or a signal, and bounded in time."""
    # A signal wakes a thread, which ends the process whatever the main thread waits for in C.
    def __init__(self):
        self.log = None                                                       # of the run that is going on
        self.begun = threading.Lock()                                         # taken by whoever ends the process
        self.bell, self.listener = socket.socketpair()
        self.bell.setblocking(False)                                          # as set_wakeup_fd wants it
        signal.set_wakeup_fd(self.bell.fileno(), warn_on_full_buffer=False)
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:                    # ignored: by nohup
                signal.signal(number, lambda *_: None)                        # the thread reads its number
        threading.Thread(target=lambda: self.end(signal.Signals(self.listener.recv(1)[0])), daemon=True).start()

    def end(self, error):
        """Say why the run ended, once over all ranks, close its log, and end the process. Does not return."""
        self.begun.acquire()                                                  # the second waits here for the end
        status, cause = describe(error)
        threading.Timer(END_PATIENCE, os._exit, [status]).start()             # if a dead disk, say, holds this up
        speaks = True
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # A signal that only some ranks get means that one was lost: torchrun, or srun, ends the others.
            alone = f"RunError: {lost_rank(cause)}" if isinstance(error, signal.Signals) else cause
            try:
                meet = functools.partial(first_cause, cause, alone)
                cause, speaks = within(STORE_PATIENCE + 2 * OTHERS_PATIENCE, meet)
            except Exception:                                                 # a stopped launcher answers nothing
                cause = alone
        if speaks:
            with contextlib.suppress(Exception):                              # a full pipe that nobody reads, no stderr
                erase = "\r\x1b[K" if self.log and self.log.on_terminal else ""          # the line of progress
                within(1, functools.partial(print, erase + cause, file=sys.stderr, flush=True))
        if self.log is not None:
            self.log.aborted(cause)
        for part in tuple(UNFINISHED):
            shutil.rmtree(part, ignore_errors=True)
        os._exit(status)

def main(argv):
    """Do what the flags say. Exits with 0: done, 1: the run failed, 2: bad settings or data, 128 + n: by signal n."""
    ending = Ending()
    try:
        source = Path(__file__).read_bytes()                                  # before anybody edits it
        sys.stdout.reconfigure(errors="backslashreplace")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        cfg = parse_flags(argv)
        if cfg.sample:
            sample_saved(cfg)
        else:
            train(cfg, make_fabric(cfg), ending, source)
    except SystemExit:                                                        # --help was shown
        pass
    except BaseException as error:
        ending.end(error)
    ending.begun.acquire()                                                    # a signal that came before has its end
    os._exit(0)                                                               # even if a thread is stuck in a read


if __name__ == "__main__":
    main(sys.argv[1:])

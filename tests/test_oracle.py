"""The trainer and reference.py against reference vectors: the extract in tests/vectors, and all in ORACLE_DIR if found.

The original trainer of recipe A computed the vectors on a CPU in float64. A directory has meta.json, with every
dimension and constant, and .npz files. Keys, steps and sizes are read from these files, and not repeated here. The
test fails at the first array that differs and names its key. `Vectors.finish` checks that no array was left out.

Config S of the extract has the parameters and the activations of its first layers only.
"""
from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from common import BF16, F64, ROOT, global_rows_of, grad_of, make_comm, make_engine, noop
from reference import Reference
from torch import Tensor

import train_gpt as tg

EXTRACT = ROOT / "tests/vectors"                                     # how: its meta.json
WHOLE = ROOT / os.environ.get("ORACLE_DIR", "../shared/oracle/a")
FIELDS = dict(num_slots="seqs_per_step", slots_per_micro_batch="micro_batch_size", document_start="bos_id")

# Limits of the largest error divided by the largest absolute value of an array (by 1 if all are 0), as published with
# the vectors: file, keys, limit for arrays stored as f64, limit for arrays that were rounded to f32 when they were
# stored. The first row that matches is used. Integers must be equal.
TOLERANCES = (
    ("s_*",  "*",                 1e-10, 2e-7),
    ("traj", "*_loss.*",          1e-11, None),
    ("traj", "*",                 1e-9,  None),
    ("opt",  "adam.*",            1e-14, None),
    ("fp8",  "*",                 1e-13, 1e-7),
    ("*",    "*",                 1e-11, 2e-7),
)

class Vectors:
    """The arrays of one file, and the keys that were not yet used. `check` compares with an array."""
    def __init__(self, oracle: Oracle, file: str) -> None:
        meta = oracle.meta
        self.file = file
        self.unused_scalars = meta["padding"]["unused_scalars"]
        with np.load(oracle.path / f"{file}.npz") as arrays:
            self.arrays = dict(arrays)
        skip_patterns = meta["padding"]["skip_keys"] + meta["loader"]["peer_shard_end_rule"]
        self.expected = set(self.arrays)
        for pattern in skip_patterns:
            self.expected.difference_update(fnmatch.filter(self.arrays, pattern))
        self.unchecked = set(self.expected)

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def __getitem__(self, key: str) -> np.ndarray:
        self.unchecked.discard(key)
        return self.arrays[key]

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self[key].copy())

    def find(self, pattern: str) -> list[tuple[str, ...]]:
        """Return groups of the keys that match a regular expression, each once, in the order of the file."""
        return list(dict.fromkeys(match.groups() for key in self.arrays if (match := re.fullmatch(pattern, key))))

    def check(self, key: str, got: Any, label: str = "", at: np.ndarray | None = None) -> None:
        """Compare with the array of this key, if the file has it.

        label: of a parameter; the array then has its entries at the flat indices `at`, or all entries.
        """
        if key not in self.expected:
            return
        want = self[key]
        got = got.detach().numpy() if isinstance(got, Tensor) else np.asarray(got)
        if label:
            at = np.arange(want.size) if at is None else at
            keep = at < got.size if label == "mlp" else ~np.isin(at, self.unused_scalars) | (label != "scalars")
            # The vectors pad `mlp` and `scalars`, which the trainer does not.
            got = got.ravel()[at[keep]]
            want = want.ravel()[keep]
        assert got.shape == want.shape, f"{self.file}: {key}: shape {got.shape}, expected {want.shape}"
        limit = 0.0
        if want.dtype.kind == "f":
            limits = next(limits for *globs, f64, f32 in TOLERANCES for limits in [(f64, f32)]
                          if all(map(fnmatch.fnmatchcase, (self.file, key), globs)))
            limit = limits[want.dtype == np.float32]
        off = np.abs(got.astype(np.float64) - want)
        error = float(off.max(initial=0) / (np.abs(want.astype(np.float64)).max(initial=0) or 1))
        assert error <= limit, f"{self.file}: {key}: error {error:.2e}, limit {limit}"        # NaN is an error too

    def finish(self) -> None:
        assert not self.unchecked, f"{self.file}: no test uses {sorted(self.unchecked)}"

@dataclass(frozen=True)
class Oracle:
    path: Path

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.path / "meta.json").read_text())

    def load(self, name: str) -> tuple[Vectors, dict[str, Any]]:
        return Vectors(self, name), self.meta[name]

    def config(self, section: str, seq_len: Sequence[int], **overrides: Any) -> tg.Config:
        """Build the Config of a section of meta.json: the recipe, the sizes of the section, then `overrides`.

        seq_len: tokens per sequence, by stage. Entries with the name of a field, or with a name in FIELDS, are copied.
        """
        recipe = self.meta["recipe"]
        sizes = self.meta[section]
        seqs_per_step = overrides.get("seqs_per_step", recipe["num_slots"])
        by_stage = zip(seq_len, *(recipe[name] for name in ("windows_blocks", "stage_lr_mul", "mtp_start", "mtp_end")))
        untie = {**recipe, **sizes}.get("split_stage", 2)
        stages = tuple(tg.Stage(tokens * seqs_per_step, *windows, lr_mul, tuple(start), tuple(end), k == untie)
                       for k, (tokens, windows, lr_mul, start, end) in enumerate(by_stage))
        field_names = {field.name for field in fields(tg.Config)}
        renamed = dict(attn_scale=recipe["attn_scale_initial"], final_long_window=recipe["final_long_window_blocks"],
                       normuon_lr=recipe["lr_normuon"], normuon_weight_decay=recipe["weight_decay_normuon"],
                       adam_lr=recipe["lr_adam"], adam_weight_decay=recipe["weight_decay_adam"])
        total_steps = sizes.get("num_scheduled_steps", 0) + sizes.get("num_extension_steps", 0)
        for ramp in ("momentum_warmup", "momentum_cooldown"):
            if f"{ramp}_steps" in sizes:
                renamed[f"{ramp}_frac"] = sizes[f"{ramp}_steps"] / total_steps
        fixed = dict(padded_vocab=sizes.get("vocab_size", 0), dtype="float64", head="plain", device="cpu",
                     stages=stages)
        with_new_names = {FIELDS.get(name, name): value for name, value in {**recipe, **sizes}.items()}
        settings = {name: value for name, value in with_new_names.items() if name in field_names}
        return tg.Config(**{**settings, **renamed, **fixed, **overrides})

def bf16_from_bits(bits: np.ndarray) -> Tensor:
    return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32))

def channel_frequencies(rotary: tg.Rotary) -> np.ndarray:
    """Return the rotary frequency of each channel of a head: pairs share one, the second half does not rotate."""
    pairs = np.repeat(rotary.frequencies, 2)
    return np.append(pairs, np.zeros_like(pairs))

def packed_seqs(tokens: np.ndarray, targets: np.ndarray, cu_seqlens: np.ndarray) -> list[tg.PackedSeq]:
    """Build sequences from stored tokens and targets (S, T), and cu_seqlens (S, C), whose padding is removed."""
    bounds = [np.unique(padded[padded >= 0]).astype(np.int32) for padded in cu_seqlens]
    # A packed sequence has T + 1 tokens: the last one is the last target.
    tokens = np.column_stack((tokens, targets[:, -1])).astype(np.int32)
    return [tg.PackedSeq(*seq) for seq in zip(tokens, bounds)]

def stored_weights(cfg: tg.Config, stored: Vectors) -> dict[str, Tensor]:
    """Return the full initial weights; banks are truncated to the trainer's number of layers."""
    weights = {}
    for spec in tg.parameter_specs(cfg):
        if f"zero.{spec.label}" in stored:
            weights[spec.label] = torch.zeros(tuple(stored[f"zero.{spec.label}"]))
        elif f"p32.{spec.label}" in stored:
            weights[spec.label] = stored.tensor(f"p32.{spec.label}")
        elif f"p16.{spec.label}" in stored:
            weights[spec.label] = bf16_from_bits(stored[f"p16.{spec.label}"])[:spec.shape[0]]
    weights.setdefault("embed", weights["lm_head"].t())                  # tied
    assert all(weights[spec.label].shape == spec.shape for spec in tg.parameter_specs(cfg))
    return weights

def engine_with(cfg: tg.Config, weights: dict[str, Tensor]) -> tg.Engine:
    found = make_engine(cfg)
    found.model.load_state_dict({**found.model.state_dict(), **weights})
    return found

class Trajectory:
    """A run of a few steps on stored tokens, with every stage, every change of the windows and the untying."""
    def __init__(self, oracle: Oracle, make_trainer: Callable) -> None:
        self.meta = oracle.meta["trajectory"]
        assert self.meta["num_layers"] == len(tg.LAYERS), "another layer table"
        self.vectors = Vectors(oracle, "traj")
        val_batch_tokens = self.meta["val_slot_tokens"] * oracle.meta["recipe"]["num_slots"]
        self.cfg = oracle.config("trajectory", self.meta["slot_tokens"], val_batch_tokens=val_batch_tokens)
        self.schedule = tg.Schedule(self.cfg)
        stored = Vectors(oracle, "traj_init")
        weights = stored_weights(self.cfg, stored)
        stored.finish()
        self.trainer = trainer = make_trainer(self.cfg, weights)
        self.gradient = trainer.grads.get if make_trainer is Reference else partial(grad_of, trainer.optimizer)
        self.pending_batches = self.cycle_batches(0)                     # rest of the current cycle

    def batches(self, pattern: str, steps: Sequence[tg.StepConfig]) -> list[tg.Batch]:
        """Build the batches of these steps with common row plans. pattern: formats (array, step) as a key."""
        seqs_by_step = []
        for step_cfg in steps:
            names = [pattern.format(name, step_cfg.step) for name in ("tokens", "targets", "cu_seqlens")]
            seqs_by_step.append(packed_seqs(*(self.vectors[name] for name in names)))
        found = tg.build_batches(self.cfg, make_comm(), None, steps, seqs_by_step)
        for step_cfg, batch in zip(steps, found, strict=True):
            key = pattern.format("cu_seqlens", step_cfg.step)
            columns = self.vectors[key].shape[-1]
            self.vectors.arrays[key] = normalize_cu_seqlens(self.vectors[key], columns)
            batch_fields = stored_fields(batch, columns)
            batch_fields["tokens"] = batch_fields.pop("inputs")
            for name, x in batch_fields.items():
                self.vectors.check(pattern.format(name, step_cfg.step), x)
        return found

    def cycle_batches(self, step: int) -> list[tg.Batch]:
        last = min(step + self.cfg.adam_every, self.schedule.total_steps)
        steps = [self.schedule.at(k) for k in range(step, last)]
        return self.batches("{}.{}", steps) if steps else []

    def check(self) -> None:
        vectors, total = self.vectors, self.schedule.total_steps
        vectors.check("dims", [self.meta[name] for name in self.meta["dims_key_order"]])
        vectors.check("bos", self.cfg.bos_id)
        vectors.check("split_step", self.schedule.last_tied_step)
        vectors.check("boundaries", list(zip(self.schedule.stage_starts, self.schedule.stage_ends)))
        validated = {str(step) for step in range(total + 1) if step == total or self.schedule.at(step).validate}
        assert {step for step, in vectors.find(r"val_loss\.(\d+)")} == validated, "validation at other steps"
        for step in range(total):
            self.check_validation(step)
            self.check_step_cfg(step, self.schedule.at(step))
            self.check_step(step, self.schedule.at(step))
        self.check_validation(total)
        vectors.finish()

    def check_validation(self, step: int) -> None:
        if f"val_loss.{step}" in self.vectors:
            step_cfg = self.schedule.at(step)
            self.vectors.check(f"val_windows.{step}", [step_cfg.short_window, step_cfg.long_window])
            batches = self.batches("val_{}", [step_cfg])
            self.vectors.check(f"val_loss.{step}", self.trainer.evaluate(batches, step_cfg))

    def check_step_cfg(self, step: int, step_cfg: tg.StepConfig) -> None:
        rotary = (*channel_frequencies(step_cfg.rotary), step_cfg.rotary.attn_scale)
        windows = step_cfg.short_window, step_cfg.long_window
        for name, got in dict(mtp=step_cfg.mtp_weights, windows=windows, yarn=rotary * 2, momentum=step_cfg.momentum,
                              adam_step=(step + 1) % self.cfg.adam_every == 0,
                              lr_mul=self.schedule.lr_factor_at(step)).items():
            self.vectors.check(f"{name}.{step}", got)
        for spec in tg.parameter_specs(self.cfg):
            lr = step_cfg.adam_lr * spec.lr_mul
            if spec.optimizer == "normuon":
                # Learning rates of matrices are scaled by shape, except those of attention.
                height, width = spec.shape[-2:]
                lr = step_cfg.normuon_lr * (1 if spec.label == "attn" else max(1, height / width) ** 0.5)
            self.vectors.check(f"lr.{step}.{spec.label}", lr)

    def check_step(self, step: int, step_cfg: tg.StepConfig) -> None:
        vectors = self.vectors
        batch = self.pending_batches.pop(0)
        vectors.check(f"slot_loss.{step}", self.trainer.forward_backward(batch, step_cfg).seq_sums)
        # Gradients are sums over sequences; the optimizer divides them by the number of sequences.
        for spec in tg.parameter_specs(self.cfg):
            grad = self.gradient(spec.label) / self.cfg.seqs_per_step
            vectors.check(f"grad_samp.{step}.{spec.label}", grad, spec.label, at=vectors[f"idx.{spec.label}"])
            vectors.check(f"grad_norm.{step}.{spec.label}", grad.double().norm())
        self.pending_batches = self.pending_batches or self.cycle_batches(step + 1)
        # Without `fetch_rows`, forward_backward fetches.
        self.trainer.optim_step(step_cfg)
        next_cfg = self.schedule.at(step + 1)
        vectors.check(f"split_after.{step}", not next_cfg.tied)
        state = self.trainer.tensors()
        for spec in tg.parameter_specs(self.cfg):
            self.check_state(step + 1, spec, next_cfg, state)

    def check_state(self, steps_done: int, spec: tg.ParameterSpec, next_cfg: tg.StepConfig,
                    state: dict[str, Tensor]) -> None:
        vectors, label = self.vectors, spec.label
        at = vectors[f"idx.{label}"]
        p = state["lm_head"].t() if label == "embed" and next_cfg.tied else state[label]     # what lookups read
        vectors.check(f"samp.{steps_done}.{label}", p, label, at)
        vectors.check(f"full.{steps_done}.{label}", p, label)
        vectors.check(f"norm.{steps_done}.{label}", p.double().norm())
        for name, moment in (("st_m", "m"), ("st_v", "v"), ("st_mom", "momentum")):
            if f"{label}.{moment}" in state:
                vectors.check(f"{name}.{steps_done}.{label}", state[f"{label}.{moment}"], label, at)
        if spec.optimizer == "adam":
            updates = 0 if label == "embed" and next_cfg.tied else steps_done // self.cfg.adam_every
            vectors.check(f"st_step.{steps_done}.{label}", updates)
        elif (key := f"st_v2.{steps_done}.{label}") in vectors:
            at = np.arange(len(vectors[key])) * self.meta["st_v2_stride"][label]
            vectors.check(key, state[f"{label}.second"], label, at)

pytestmark = pytest.mark.recipe


# ---- Config S: one sequence with known parameters, forward and backward
class ConfigS:
    def __init__(self, oracle: Oracle) -> None:
        sizes = oracle.meta["config_s"]
        self.sizes = sizes
        assert sizes["num_layers"] == len(tg.LAYERS), "another layer table"
        self.stored = Vectors(oracle, "s_inputs")
        length = sizes["slot_tokens"]
        stages = len(oracle.meta["recipe"]["windows_blocks"])
        self.cfg = oracle.config("config_s", [length] * stages, seqs_per_step=1, max_doc_len=length,
                                 val_batch_tokens=length)
        weights = stored_weights(self.cfg, self.stored)
        self.trainer = engine_with(self.cfg, weights)
        self.naive = Reference(self.cfg, weights)
        self.step_cfg = replace(tg.Schedule(self.cfg).at(0), short_window=sizes["short_window"],
                              long_window=sizes["long_window"])
        self.batch = self.batch_with(self.stored["cu_seqlens"])

    def batch_with(self, bounds: np.ndarray) -> tg.Batch:
        seqs = packed_seqs(*(self.stored[name][None] for name in ("tokens", "targets")), bounds[None])
        return tg.build_batches(self.cfg, make_comm(), None, [self.step_cfg], [seqs])[0]

    def stretched(self) -> tg.StepConfig:
        short, long = self.sizes["yarn1_windows"]
        stages = [replace(tg.STAGES[0], long_window=window) for window in (self.sizes["long_window"], long)]
        _, rotary = tg.rotary_by_stage(replace(self.cfg, stages=stages, window_block=1))
        return replace(self.step_cfg, short_window=short, long_window=long, rotary=rotary)

def check_s_acts(oracle: Oracle) -> None:
    setup, vectors = ConfigS(oracle), Vectors(oracle, "s_acts")
    one_document = setup.batch_with(np.asarray([0, setup.batch.tokens.shape[1]]))
    names = [name for name, in vectors.find("losses_(.*)")]
    cases = [("", name, setup.step_cfg, setup.batch) for name in names or ["m3"]]
    cases += [("long.", "m3", setup.step_cfg, one_document), ("yarn1.", "m2", setup.stretched(), setup.batch)]
    for prefix, name, step_cfg, batch in cases:
        weighted = replace(step_cfg, mtp_weights=tuple(setup.stored[f"mtp_{name}"]))
        check_activations(setup, vectors, prefix, name, weighted, batch)
        if f"{prefix}loss_{name}" in vectors:                            # not in the extract
            for trainer in (setup.naive, setup.trainer):
                vectors.check(f"{prefix}loss_{name}", trainer.forward_backward(batch, weighted).seq_sums[0])
                vectors.check(f"{prefix}eval_loss", trainer.evaluate([batch], step_cfg))
    # `step_cfg` and `batch` are those of the last case, yarn1.
    vectors.check("yarn1.windows", [step_cfg.short_window, step_cfg.long_window])
    vectors.check("yarn1.angular_freq", channel_frequencies(step_cfg.rotary))
    vectors.check("yarn1.attn_scale", [step_cfg.rotary.attn_scale] * 2)
    length = batch.tokens.shape[1]
    for name, table in (("factor1", setup.trainer.model.rotary_cos), ("factor2", setup.trainer.model.rotary_sin)):
        vectors.check(f"yarn1.{name}", table[:length])
        # In paired layers, a row of the table has the values of two consecutive positions.
        vectors.check(f"yarn1.paired_{name}", table[:2 * length].view(length, -1))
    vectors.finish()

def check_activations(setup: ConfigS, vectors: Vectors, prefix: str, name: str, step_cfg: tg.StepConfig,
                      batch: tg.Batch) -> None:
    """Compare the intermediate results of reference.py in forward order, then gradients of some of them."""
    rows = vectors["rows16"]
    seen: dict[str, Tensor] = {}
    losses = setup.naive.losses(setup.naive.leaves(), batch, 0, step_cfg, step_cfg.mtp_weights, seen)
    for key, x in seen.items():
        vectors.check(prefix + key, x[rows] if prefix else x)
        vectors.check(f"{prefix}{key}_rows16", x[rows])
        # Evaluation has the same results, because no document of the sequence is long enough to be truncated.
        vectors.check(f"{prefix}eval_{key}_rows16", x[rows])
        vectors.check(f"{prefix}sumsq.{key}", x.square().sum())
    vectors.check(f"{prefix}losses_{name}", losses)
    if prefix or name != "m3" or "grad_logits_rows16" not in vectors:
        return
    traced = [key for key in seen if key.startswith("mix") or key in ("final_norm", "raw_logits")]
    for key, grad in zip(traced, torch.autograd.grad(losses.sum(), [seen[key] for key in traced])):
        vectors.check("grad_logits_rows16" if key == "raw_logits" else f"grad_rows16.{key}", grad[rows])
        vectors.check(f"grad_sumsq.{key}", grad.square().sum())


# ---- Trajectory and optimizer
def check_traj(oracle: Oracle, make_trainer: Callable = engine_with) -> None:
    Trajectory(oracle, make_trainer).check()

def check_opt(oracle: Oracle) -> None:
    vectors = Vectors(oracle, "opt")
    for case, in vectors.find(r"pe_in\.(.*)"):
        x = vectors.tensor(f"pe_in.{case}")
        matrices = x.view(-1, *x.shape[-2:])
        for polar in (tg.polar_express, reference.polar_express):
            vectors.check(f"pe_out.{case}", polar(matrices).view(x.shape))
    for case, in vectors.find(r"(nm_\w+)\.p0"):
        check_normuon(vectors, case)
    check_mantissa(vectors)
    check_adam(oracle, vectors)
    vectors.finish()

def check_normuon(vectors: Vectors, case: str) -> None:
    p = vectors.tensor(f"{case}.p0")
    count, height, width = p.shape
    second_moment = p.new_zeros((count, height, 1) if height >= width else (count, 1, width))
    state = dict(momentum=torch.zeros_like(p), second=second_moment)
    naive_p = p.clone()
    # reference.normuon stores new tensors in its dict, so a shallow copy is enough.
    naive_state = dict(state)
    key = f"{case}.per_matrix_lr_mul"
    extra = vectors.tensor(key) if key in vectors else p.new_ones(count)
    for step in range(len(vectors.find(rf"{case}\.(g\d+)"))):
        lr, shape_factor, mu, beta2, decay = torch.from_numpy(vectors[f"{case}.hyper{step}"]).unbind()
        g = vectors.tensor(f"{case}.g{step}")
        muls = (shape_factor * extra).view(-1, 1, 1)
        naive_p = reference.normuon(naive_p, g, naive_state, mu, beta2, lr, muls, decay)
        tg.normuon_update(p, None, g, *state.values(), 1.0, mu, lr, muls, lr * decay, float(beta2))
        for got, moments in ((naive_p, naive_state), (p, state)):
            for name, x in (("mom", moments["momentum"]), ("v2_", moments["second"]), ("p", got)):
                vectors.check(f"{case}.{name}{step + 1}", x)

def check_mantissa(vectors: Vectors) -> None:
    """Compare consecutive updates of bf16 weights and of the 16 mantissa bits below them, bit for bit."""
    p, mantissa = (torch.from_numpy(vectors[f"mt.{name}_in"].view(np.int16).copy()) for name in ("p", "m"))
    unused = torch.zeros(p.shape)
    for step in range(len(vectors.find(r"mt\.(g\d+)"))):
        decay, lr = torch.from_numpy(vectors[f"mt.wd_lr{step}"]).unbind()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg, "normuon_direction", lambda *_, update=bf16_from_bits(vectors[f"mt.g{step}"]): update)
            tg.normuon_update(p.view(BF16), mantissa, unused, unused, unused, 1.0, lr, lr, torch.ones_like(lr),
                              decay, 0.0)
        vectors.check(f"mt.p_out{step}", p.numpy().view(np.uint16))
        vectors.check(f"mt.m_out{step}", mantissa.numpy().view(np.uint16))

def check_adam(oracle: Oracle, vectors: Vectors) -> None:
    """Compare Adam updates of reference.py, tied and then untied. test_updates.py compares the trainer with it."""
    labels = [label for label, in vectors.find(r"adam\.(\w+)\.p_init")]
    cfg = oracle.config("trajectory", oracle.meta["trajectory"]["slot_tokens"], seqs_per_step=1)
    naive = Reference(cfg, {label: vectors.tensor(f"adam.{label}.p_init") for label in labels})
    split_step = oracle.meta["opt"]["split_step"]
    for step in range(len(vectors.find(r"adam\.lr_mul\.(\d+)"))):
        adam_lr = cfg.adam_lr * float(vectors[f"adam.lr_mul.{step}"])
        step_cfg = replace(tg.Schedule(cfg).at(step), adam_lr=adam_lr, tied=step <= split_step,
                           untie_after=step == split_step)
        for label in labels:
            naive.grads[label] += vectors.tensor(f"adam.{label}.g{step}")
        for when in ("before", "after"):
            if when == "after":
                naive.optim_step(step_cfg)
            embed = naive.state["embed"] | dict(step=naive.updates["embed"]) if step_cfg.untie_after else {}
            for name, x in embed.items():
                vectors.check(f"adam.split.embed_{name}_{when}", x)
        for label in labels:
            after = dict(p=naive.p[label], **naive.state[label], t=naive.updates[label])
            for name, x in after.items():
                vectors.check(f"adam.{label}.{name}{step}", x)


# ---- Loader and bigram hash
def check_loader(oracle: Oracle) -> None:
    vectors, meta = oracle.load("loader")
    sizes = "slot_tokens", "max_doc_len", "slot_tokens_after", "max_doc_len_after"
    for case, in vectors.find(r"(\w+)\.slot_tokens_maxlen"):
        vectors.check(f"{case}.slot_tokens_maxlen", [meta[case][name] for name in sizes if name in meta[case]])
    vectors.check("val.slot_tokens", [meta["val"]["slot_tokens"]])
    for key, array in vectors.arrays.items():
        if key.endswith("cu_seqlens"):
            vectors.arrays[key] = normalize_cu_seqlens(array, array.shape[-1])
    for case, world_size in vectors.find(r"(\w+)_w(\d+)\.(?:before\.)?inputs"):
        if any(key.startswith(f"{case}_w{world_size}.") for key in vectors.expected):
            check_batches(oracle, vectors, case, int(world_size))
    vectors.finish()

def normalize_cu_seqlens(cu_seqlens: np.ndarray | Tensor, columns: int) -> np.ndarray:
    """Remove repeated bounds, which are padding, and pad with -1: (..., C) -> (..., columns) or wider."""
    rows = np.asarray(cu_seqlens).reshape(-1, np.shape(cu_seqlens)[-1])
    found = [np.unique(row[row >= 0]) for row in rows]
    out = np.full((len(rows), max(columns, *map(len, found))), -1, np.int64)
    for row, filled in zip(found, out):
        filled[:len(row)] = row
    return out.reshape(*np.shape(cu_seqlens)[:-1], -1)

def check_batches(oracle: Oracle, vectors: Vectors, case: str, world_size: int) -> None:
    """Compare the batches of every rank: (step, micro-step, rank, tokens). Sequence index: micro-step * W + rank."""
    meta = oracle.meta["loader"]
    seqs_per_step = meta["num_slots"]
    validation = case.startswith("val")
    sizes = meta["val" if validation else case]
    key_prefixes = []                                                    # (prefix of keys, steps)
    step_sizes = []                                                      # (tokens per sequence, max_doc_len)
    for ending, prefix in (("", ""), ("_before", "before."), ("_after", "after.")):
        prefix = f"{case}_w{world_size}.{prefix}"
        if f"{prefix}inputs" in vectors:
            key_prefixes.append((prefix, len(vectors[f"{prefix}inputs"])))
            after = ending if ending == "_after" else ""
            step_sizes += [(sizes[f"slot_tokens{after}"], sizes.get(f"max_doc_len{after}", 0))] * key_prefixes[-1][1]
    seq_len, _ = step_sizes[0]
    stages = len(oracle.meta["recipe"]["windows_blocks"])
    cfg = oracle.config("loader", [seq_len] * stages, vocab_size=tg.GPT2_VOCAB, padded_vocab=tg.GPT2_VOCAB,
                        seqs_per_step=seqs_per_step, val_batch_tokens=seqs_per_step * seq_len,
                        val_tokens=seqs_per_step * seq_len * len(step_sizes))
    found = tg.read_shard_headers(str(oracle.path / "loader_shards" / ("val_*.bin" if validation else "train_*.bin")))
    headers = [header._replace(bos_id=cfg.bos_id) for header in found]
    any_step_cfg = tg.Schedule(cfg).at(0)
    steps = [replace(any_step_cfg, step=step, seq_len=tokens) for step, (tokens, _) in enumerate(step_sizes)]
    batches = []
    for rank in range(world_size):
        communicator = make_comm(rank, world_size)
        if validation:
            found = tg.ValidationSet(cfg, communicator, headers).batches(steps[0])
        else:
            found = load_batches(cfg, communicator, headers, steps, step_sizes)
        # One process builds the batches of all ranks, so there is no rank to exchange requests with.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg, "exchange_row_requests", noop)
            batches.append(list(found))

    first = 0
    for prefix, count in key_prefixes:
        columns = vectors.arrays.get(f"{prefix}cu_seqlens", np.zeros(0)).shape[-1]
        stored = [stored_fields(batch, columns)
                  for rank_batches in batches for batch in rank_batches[first:first + count]]
        for name in stored[0]:
            seqs = np.stack([fields[name] for fields in stored])
            by_rank = seqs.reshape(world_size, count, *seqs.shape[1:])   # (rank, step, micro-step, tokens)
            vectors.check(prefix + name, by_rank.transpose(1, 2, 0, 3))
        first += count

def stored_fields(batch: tg.Batch, columns: int) -> dict[str, np.ndarray]:
    """Return the fields of a batch that the vectors contain; cu_seqlens has at least `columns` columns."""
    rows = global_rows_of(batch, "bigram_embed")
    bounds = normalize_cu_seqlens(batch.cu_seqlens, columns)
    return dict(inputs=batch.tokens.numpy(), targets=batch.targets.numpy(), bigram_ids=rows.numpy(), cu_seqlens=bounds)

def load_batches(cfg: tg.Config, communicator: tg.Communicator, headers: list[tg.ShardHeader],
                 steps: list[tg.StepConfig], step_sizes: list[tuple[int, int]]) -> Iterator[tg.Batch]:
    """Yield the batches of these steps, each a cycle.

    The vectors change max_doc_len between steps. It is constant in a run, so each step replaces the loader's cfg.
    """
    loader = tg.Loader(cfg, communicator, headers, ())
    with contextlib.closing(loader):
        for step_cfg in steps:
            loader.cfg = loader.packer.cfg = replace(cfg, max_doc_len=step_sizes[step_cfg.step][1])
            loader.cycles = iter([[step_cfg]])
            loader.start()
            yield loader.next()

def check_bigram(oracle: Oracle) -> None:
    vectors, meta = oracle.load("bigram")
    rows = meta["rows"]
    vectors.check("table_rows", rows)
    previous, current = (vectors[name].astype(np.int32) for name in ("prev", "cur"))
    pairs = np.stack((previous, current), axis=1).ravel()
    interleaved = np.append(np.zeros(2, np.int32), pairs)
    sequence = vectors["sequence"].astype(np.int32)
    for hash_rows in (tg.bigram_hash, reference.bigram_rows):
        found = hash_rows(interleaved, rows)
        vectors.check("row", found[3::2])
        vectors.check("first_position_row", found[0])
        second = [hash_rows(np.asarray([0, token], np.int32), rows)[1] for token in vectors["position1_cur"]]
        vectors.check("position1_row", second)
        vectors.check("sequence_rows", hash_rows(sequence, rows))
    # `n_extremes` states how many pairs are extreme values. It is not compared.
    vectors.unchecked.discard("n_extremes")
    vectors.finish()


# ---- Schedule
def check_schedule(oracle: Oracle) -> None:
    vectors, meta = oracle.load("schedule")
    seqs_per_step = oracle.meta["recipe"]["num_slots"]
    small = dict(num_heads=2, model_dim=2 * meta["head_dim"], vocab_size=16, padded_vocab=16, bigram_rows=16)
    seq_len = [tokens // seqs_per_step for tokens in meta["batch_tokens"]]
    cfg = oracle.config("schedule", seq_len, **small, dtype="bfloat16")
    schedule = tg.Schedule(cfg)
    step_cfgs = [schedule.at(step) for step in range(schedule.total_steps + 1)]
    windows = [(v.short_window, v.long_window) for v in step_cfgs]
    before_growth = windows[-1][0], cfg.stages[step_cfgs[-1].stage].long_window * cfg.window_block
    tied = [True]                                                         # during the update, by step
    for v in step_cfgs[:-1]:
        tied.append(tied[-1] and not v.untie_after)
    for name, got in dict(
            total_steps=schedule.total_steps, sched_ext=[cfg.num_scheduled_steps, cfg.num_extension_steps],
            split_step=schedule.last_tied_step, boundaries=list(zip(schedule.stage_starts, schedule.stage_ends)),
            lr_mul=[schedule.lr_factor_at(v.step) for v in step_cfgs], momentum=[v.momentum for v in step_cfgs],
            stage=[v.stage for v in step_cfgs], batch_size=[v.seq_len * seqs_per_step for v in step_cfgs],
            adam_step=[(v.step + 1) % cfg.adam_every == 0 for v in step_cfgs],
            mtp_count=[len(v.mtp_weights) for v in step_cfgs],
            lr_normuon=[v.normuon_lr for v in step_cfgs], lr_adam=[v.adam_lr for v in step_cfgs],
            tied_during_update=tied,
            windows_train=[*windows[:-1], before_growth], windows_final_validation=windows[-1]).items():
        vectors.check(name, got)
    for name in ("mtp", "mtp_f32"):
        # The vectors pad the weights of a step to the same number of columns.
        got = vectors[name].astype(np.float64)
        for weights, step_cfg in zip(got, step_cfgs):
            weights[:len(step_cfg.mtp_weights)] = step_cfg.mtp_weights
        vectors.check(name, got)
    check_yarn(vectors, cfg, schedule)
    optimizer = make_engine(replace(cfg, model_dim=16, head_dim=8)).optimizer
    for label, spec in optimizer.model.specs.items():
        # The multiplier of a bank is that of its first matrix. Down matrices, which have another one, are not first.
        is_bank = spec.optimizer == "normuon"
        vectors.check(f"lr_mul_param.{label}", float(optimizer.lr_muls[label][0]) if is_bank else spec.lr_mul)
    vectors.finish()

def check_yarn(vectors: Vectors, cfg: tg.Config, schedule: tg.Schedule) -> None:
    """Compare frequencies and scale at the start and after each change of the long window, and the last bf16 tables."""
    windows = [stage.long_window * cfg.window_block for stage in cfg.stages]
    changes = [k for k in range(1, len(windows)) if windows[k] != windows[k - 1]]
    vectors.check("yarn_window_pairs", [(windows[k - 1], windows[k]) for k in changes])
    for i, stage in enumerate([0, *changes]):
        rotary = schedule.rotary[stage]
        for kind in ("f64.plain", "f64.paired", "f32.plain", "f32.paired"):
            vectors.check(f"yarn_{kind}.freq.{i}", channel_frequencies(rotary))
            vectors.check(f"yarn_{kind}.scale.{i}", rotary.attn_scale)
    keys = "yarn_f32.plain.factor1_bf16", "yarn_f32.plain.factor2_bf16"
    rows = len(vectors[keys[0]])
    model = tg.GPT(cfg, tg.attention_reference, rows, {})
    model.set_rotary(schedule.rotary[-1].frequencies)
    for key, table in zip(keys, (model.rotary_cos, model.rotary_sin)):
        bits = vectors.arrays[key]
        bits[bits == 0x8000] = 0                                          # -0.0 equals 0.0
        found = (table[:rows] + 0.0).view(torch.int16)
        vectors.check(key, found.numpy().view(np.uint16))


# ---- fp8 head
def check_fp8(oracle: Oracle) -> None:
    """Compare first the bytes of the head, because rounding errors of fp8 are as large as bugs."""
    vectors, _ = oracle.load("fp8")
    x, w = (bf16_from_bits(vectors[f"{name}16"]).double() for name in ("x", "w"))
    targets = torch.from_numpy(vectors["targets"])[None]
    logits_dtypes = dict(f64logits=F64, bf16logits=BF16, exact=None)
    for mode, mtp, grad_out in vectors.find(r"(\w+)\.(m\w+?)(?:\.(\w+))?\.(?:losses|grad_\w+)"):
        weights = vectors[f"mtp.{mtp}"].tolist()
        arriving = vectors.tensor(f"grad_out.{grad_out or 'ones'}")
        for head in (reference.fp8_head, trainer_head):
            found = head(x, w, targets, weights, arriving, logits_dtypes[mode])
            check_head(vectors, mode, mtp, grad_out, arriving, found)
    # An upstream gradient of 1/8 goes into the scale, as modded-nanogpt's factor for one rank does.
    for name, scale in (("x_s", tg.FP8_Y_SCALE), ("w_s", tg.FP8_W_SCALE), ("grad_s.w8", tg.FP8_GRAD_SCALE),
                        ("grad_s.w1", tg.FP8_GRAD_SCALE / 8)):
        # The matmuls receive the scales in f32.
        vectors.arrays[name] = vectors.arrays[name].astype(np.float32).astype(np.float64)
        vectors.check(name, scale)
    vectors.finish()

def trainer_head(y: Tensor, w: Tensor, targets: Tensor, mtp_weights: Sequence[float], grad_losses: Tensor,
                 logits_dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return what `reference.fp8_head` returns, from the trainer's HeadLoss; logits_dtype None: precision "plain".

    In float64, the trainer does not round the logits. So they are rounded here on their way to the loss.
    """
    found: dict[str, Tensor] = {}
    losses_and_grad = tg.mtp_losses_and_grad

    def recorded(logits: Tensor, ids: Tensor, weights: Tensor, grad: Tensor, grad_factor: float) -> tuple[Tensor, ...]:
        logits = logits.to(logits_dtype or F64)
        found["logits"] = logits.double()
        unrounded = torch.empty_like(grad, dtype=F64)
        losses_and_grad(logits, ids, weights, unrounded, 1 / tg.LOGIT_WIDTH)
        result = losses_and_grad(logits, ids, weights, grad, grad_factor)
        found.update(payload=grad, grad_logits=unrounded)
        return result

    y, w = (x.detach().clone().requires_grad_() for x in (y, w))
    precision = "plain" if logits_dtype is None else "emulated"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "mtp_losses_and_grad", recorded)
        losses, _ = tg.HeadLoss.apply(y, w, targets, torch.tensor(mtp_weights, dtype=F64), precision, tg.as_matrix(w))
        saved = losses.grad_fn.saved_tensors
        found["grad_y"], found["grad_w"] = torch.autograd.grad(losses, (y, w), grad_losses)
    return found | dict(losses=losses.detach(), y8=saved[0], w8=saved[1])

def check_head(vectors: Vectors, mode: str, mtp: str, grad_out: str | None, arriving: Tensor,
               found: dict[str, Tensor]) -> None:
    """Compare what a head has found with the arrays of one case. arriving (N,): gradient of the losses."""
    prefix = ".".join(filter(None, (mode, mtp, grad_out)))
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    if mode != "exact":
        for key, name, dtype in (("x_e4m3", "y8", e4m3), ("w_e4m3", "w8", e4m3),
                                 (f"{prefix}.grad_logits_e5m2", "payload", e5m2)):
            # The payload of mixed gradients is that of the logits, without the factors of the rows.
            if name != "payload" or grad_out != "mixed":
                vectors.check(key, found[name].to(dtype).view(torch.uint8))
    vectors.check(f"{mode}.logits_raw_rows0_8", found["logits"][:8])
    vectors.check(f"{prefix}.losses", found["losses"])
    if grad_out != "mixed":
        vectors.check(f"{prefix}.grad_x", found["grad_y"])
        vectors.check(f"{prefix}.grad_w32", found["grad_w"])
        return
    # modded-nanogpt multiplies by the factor of a row before it rounds to e5m2. This project multiplies afterwards, and
    # the largest factor goes into the scale. So compare the gradient before the rounding, by way of the stored results.
    y8, w8, payload = (found[name].double() for name in ("y8", "w8", "payload"))
    factors = arriving[:, None]
    original = reference.nearest_fp8(factors * found["grad_logits"] / reference.GRAD_SCALE, e5m2)
    vectors.check(f"{prefix}.grad_x", reference.GRAD_SCALE * reference.W_SCALE * original @ w8.t())
    vectors.check(f"{prefix}.grad_w32", reference.GRAD_SCALE * reference.Y_SCALE * y8.t() @ original)
    vectors.check(f"{mode}.{mtp}.ones.grad_x", found["grad_y"] / factors)
    largest = factors.abs().max()
    weighted = reference.nearest_fp8(factors / largest * payload, e5m2)
    expected = largest * reference.GRAD_SCALE * reference.Y_SCALE * y8.t() @ weighted
    assert float((found["grad_w"] - expected).abs().max() / expected.abs().max()) <= 1e-13, prefix


# ---- The tests
CHECKS = dict(s_acts=check_s_acts, traj=check_traj, opt=check_opt, loader=check_loader, schedule=check_schedule,
              bigram=check_bigram, fp8=check_fp8)
SLOW_CHECKS = CHECKS | dict(traj_of_reference=partial(check_traj, make_trainer=Reference))

@pytest.mark.parametrize("path, check", [
    *(pytest.param(EXTRACT, check, id=f"extract-{name}") for name, check in CHECKS.items()),
    *(pytest.param(WHOLE, check, id=f"whole-{name}", marks=pytest.mark.slow) for name, check in SLOW_CHECKS.items())])
def test_vectors(path: Path, check: Callable[[Oracle], None]) -> None:
    if not path.is_dir():
        pytest.skip(f"no directory {path}: ORACLE_DIR may name one with all reference vectors")
    check(Oracle(path))

def test_Config__defaults_are_the_recipe() -> None:
    """Constants of the vectors equal the defaults of Config and of the module, except sizes of runs and of tests."""
    meta = Oracle(EXTRACT).meta
    seqs_per_step = meta["recipe"]["num_slots"]
    cfg = Oracle(EXTRACT).config("schedule", [tokens // seqs_per_step for tokens in meta["schedule"]["batch_tokens"]])
    not_recipe = {"dtype", "head", "device", "padded_vocab"}
    for field in fields(tg.Config):
        assert field.name in not_recipe or getattr(cfg, field.name) == getattr(tg.Config(), field.name), field.name
    assert meta["recipe"]["rms_eps"] == tg.RMS_EPS
    assert meta["recipe"]["softcap"] == [tg.LOGIT_CAP, tg.LOGIT_SHIFT, tg.LOGIT_WIDTH]

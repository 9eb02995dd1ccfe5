"""Reference vectors: a directory of them, the comparison, and a run of a few steps beside stored ones.

The vectors are numbers that the original trainer of recipe A computed on a CPU in float64. A directory holds meta.json
(every dimension and constant) and .npz files; which keys and steps exist is read from the files. Nothing here knows a
size. The first array that is off raises Mismatch with its key. `Vectors.finish` insists that no array was forgotten.
"""
from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import grad_of
from reference import Reference
from torch import Tensor

import train_gpt as tg

ROOT = Path(__file__).resolve().parent.parent
EXTRACT = ROOT / "tests/vectors"                                     # made by make_vectors.py
WHOLE = ROOT / os.environ.get("ORACLE_DIR", "../shared/oracle/a")
CPU = tg.Fabric(torch.device("cpu"))

# Limits of the largest error over the largest absolute value of an array (over 1 if all are 0), as published with the
# vectors: file, keys, limit for arrays stored as f64, and for those that were rounded to f32 when stored. The first row
# that fits counts. Integers must be equal.
TOLERANCES = (
    ("s_*",  "*",                 1e-10, 2e-7),
    ("traj", "*_loss.*",          1e-11, None),
    ("traj", "*",                 1e-9,  None),
    ("fp8",  "*.mixed.grad_[xw]*", 0.25, 0.25),                          # e5m2 first, then the factors by position
    ("fp8",  "*",                 1e-10, 2e-7),
    ("*",    "*",                 1e-11, 2e-7),
)


class Mismatch(AssertionError):
    """An array that is off."""

    def __init__(self, file: str, key: str, error: object, limit: object) -> None:
        super().__init__(f"{file}: {key}: error {error}, limit {limit}")


class Vectors:
    """The arrays of one file, which of them were used, and the comparison."""

    def __init__(self, oracle: Oracle, file: str) -> None:
        meta = oracle.meta
        self.file = file
        self.unused_scalars = meta["padding"]["unused_scalars"]
        self.compares = True                                             # or does another rank?
        with np.load(oracle.path / f"{file}.npz") as arrays:
            self.arrays = dict(arrays)
        skipped = meta["padding"]["skip_keys"] + meta["loader"]["peer_shard_end_rule"]
        self.expected = {key for key in self.arrays if not any(fnmatch.fnmatchcase(key, glob) for glob in skipped)}
        self.left = set(self.expected)
        self.compared = set()

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def __getitem__(self, key: str) -> np.ndarray:
        """Return an input of the computation."""
        self.left.discard(key)
        return self.arrays[key]

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self[key].copy())

    def find(self, pattern: str) -> list[tuple[str, ...]]:
        """Return groups of the keys that match a regular expression, each once, in the order of the file."""
        return list(dict.fromkeys(match.groups() for key in self.arrays if (match := re.fullmatch(pattern, key))))

    def check(self, key: str, got: Any, label: str = "", at: np.ndarray | None = None) -> None:
        """Compare, if there is such a key. With the label of a parameter: its entries at flat indices, or all."""
        if key not in self.expected:
            return
        want = self[key]
        if not self.compares:
            return
        got = got.detach().numpy() if isinstance(got, Tensor) else np.asarray(got)
        if label:
            at = np.arange(want.size) if at is None else at
            keep = at < got.size if label == "mlp" else ~np.isin(at, self.unused_scalars) | (label != "scalars")
            got = got.ravel()[at[keep]]
            want = want.ravel()[keep]                                    # without the vectors' padding
        if got.shape != want.shape:
            raise Mismatch(self.file, key, f"shape {got.shape}", want.shape)
        limit = 0.0
        if want.dtype.kind == "f":
            limits = next(limits for *globs, f64, f32 in TOLERANCES for limits in [(f64, f32)]
                          if all(map(fnmatch.fnmatchcase, (self.file, key), globs)))
            limit = limits[want.dtype == np.float32]
        self.compared.add(key)
        off = np.abs(got.astype(np.float64) - want)
        error = float(off.max(initial=0) / (np.abs(want.astype(np.float64)).max(initial=0) or 1))
        if not error <= limit:                                           # NaN is an error too
            raise Mismatch(self.file, key, f"{error:.2e}", limit)

    def finish(self) -> None:
        """Insist that every array was compared or went into the computation, by somebody."""
        print(f"{self.file}: {len(self.compared)} of {len(self.arrays)} arrays compared")
        assert not self.left, f"{self.file}: nothing looks at {sorted(self.left)}"


@dataclass(frozen=True)
class Oracle:
    """A directory of vectors."""
    path: Path
    row_comms: str = "sparse"

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.path / "meta.json").read_text())

    @property
    def files(self) -> list[str]:
        return sorted(file.stem for file in self.path.glob("*.npz"))

    def open(self, file: str) -> Vectors:
        return Vectors(self, file)

    def config(self, section: str, slot_tokens: Sequence[int], **more: Any) -> tg.Config:
        """Return recipe and sizes of a section of meta.json. A field of the same name is taken over, `more` wins."""
        recipe, sizes = self.meta["recipe"], self.meta[section]
        num_slots = more.get("num_slots", recipe["num_slots"])
        rows = zip(slot_tokens, *(recipe[name] for name in ("windows_blocks", "stage_lr_mul", "mtp_start", "mtp_end")))
        untie = {**recipe, **sizes}.get("split_stage", 2)
        stages = tuple(tg.Stage(tokens * num_slots, *windows, lr_mul, tuple(start), tuple(end), k == untie)
                       for k, (tokens, windows, lr_mul, start, end) in enumerate(rows))
        same = {field.name for field in fields(tg.Config)}
        renamed = dict(attn_scale=recipe["attn_scale_initial"], final_long_window=recipe["final_long_window_blocks"],
                       normuon_lr=recipe["lr_normuon"], normuon_weight_decay=recipe["weight_decay_normuon"],
                       adam_lr=recipe["lr_adam"], adam_weight_decay=recipe["weight_decay_adam"])
        own = dict(padded_vocab=sizes.get("vocab_size", 0), dtype="float64", row_comms=self.row_comms, head="plain",
                   device="cpu", stages=stages)
        taken = {name: value for name, value in {**recipe, **sizes}.items() if name in same}
        return tg.Config(**{**taken, **renamed, **own, **more})


def bf16(words: np.ndarray) -> Tensor:
    return torch.from_numpy((words.astype(np.uint32) << 16).view(np.float32))


def every_frequency(rotary: tg.Rotary) -> np.ndarray:
    """One of each channel of a head: neighbours share theirs, the second half does not rotate."""
    pairs = np.repeat(rotary.frequencies, 2)
    return np.append(pairs, np.zeros_like(pairs))


def slots_of(tokens: np.ndarray, targets: np.ndarray, cu_seqlens: np.ndarray) -> list[tg.Slot]:
    """Make slots of stored (slots, T) arrays; a row of cu_seqlens counts by the borders it names, however often."""
    return [tg.Slot(np.append(inputs, last).astype(np.int32), np.unique(borders).astype(np.int32))
            for inputs, last, borders in zip(tokens, targets[:, -1], cu_seqlens)]


def stored_weights(cfg: tg.Config, stored: Vectors) -> dict[str, Tensor]:
    """Return whole initial weights; banks are cut to the trainer's number of layers."""
    weights = {}
    for row in tg.parameter_table(cfg):
        if f"zero.{row.label}" in stored:
            weights[row.label] = torch.zeros(tuple(stored[f"zero.{row.label}"]))
        elif f"p32.{row.label}" in stored:
            weights[row.label] = stored.tensor(f"p32.{row.label}")
        elif f"p16.{row.label}" in stored:
            weights[row.label] = bf16(stored[f"p16.{row.label}"])[:row.shape[0]]
    weights.setdefault("embed", weights["lm_head"].t())                  # tied
    assert all(weights[row.label].shape == row.shape for row in tg.parameter_table(cfg))
    return weights


def executor_with(cfg: tg.Config, weights: dict[str, Tensor], fabric: tg.Fabric = CPU) -> tg.Executor:
    executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    with torch.no_grad():
        for label, whole in weights.items():
            executor.model.get_parameter(label).copy_(executor.shard(label, whole))
    return executor


def gradient(run: tg.Executor | Reference, label: str) -> Tensor:
    return run.grads[label] if isinstance(run, Reference) else grad_of(run.optimizer, label)


class Trajectory:
    """A run of a few steps through every stage, change of the windows and the split, on stored tokens.

    Ranks of a process group share it: each computes its slots and updates its part, and rank 0 compares the whole.
    """

    def __init__(self, oracle: Oracle, fabric: tg.Fabric = CPU, naive: bool = False) -> None:
        """naive: a run of reference.py in place of the trainer's."""
        self.meta = oracle.meta["trajectory"]
        assert self.meta["num_layers"] == len(tg.LAYERS), "another layer table"
        self.vectors = oracle.open("traj")
        self.vectors.compares = fabric.rank == 0
        self.fabric = fabric
        val_batch_tokens = self.meta["val_slot_tokens"] * oracle.meta["recipe"]["num_slots"]
        self.cfg = oracle.config("trajectory", self.meta["slot_tokens"], val_batch_tokens=val_batch_tokens)
        self.schedule = tg.Schedule(self.cfg)
        stored = oracle.open("traj_init")
        weights = stored_weights(self.cfg, stored)
        stored.finish()
        if naive:
            self.executor = Reference(self.cfg, weights)
            self.planner = tg.Planner(self.cfg, CPU)
        else:
            self.executor = executor_with(self.cfg, weights, fabric)
            self.planner = self.executor.planner
        self.ready = self.cycle(0)                                       # batches of the cycle that are not yet used

    def batches(self, pattern: str, steps: Sequence[tg.Values]) -> list[tg.Batch]:
        """Plan this rank's slots of each step together; the pattern is that of the keys of a step."""
        mine = []
        for values in steps:
            names = [pattern.format(name, values.step) for name in ("tokens", "targets", "cu_seqlens", "bigram_ids")]
            slots = slots_of(*(self.vectors[name] for name in names[:3]))
            rows = tg.bigram_hash(self.vectors[names[0]].astype(np.int32), self.cfg.bigram_rows)
            self.vectors.check(names[3], rows)
            mine.append(slots[self.fabric.rank::self.fabric.world])
        return self.planner.batches("oracle", steps, mine)

    def cycle(self, step: int) -> list[tg.Batch]:
        """Return batches of the step and of those that share its plans."""
        last = min(step + self.cfg.adam_every, self.schedule.total_steps)
        return self.batches("{}.{}", [self.schedule.at(k) for k in range(step, last)]) if step < last else []

    def check(self) -> None:
        vectors, total = self.vectors, self.schedule.total_steps
        vectors.check("dims", [self.meta[name] for name in self.meta["dims_key_order"]])
        vectors.check("bos", self.cfg.document_start)
        vectors.check("split_step", self.schedule.untie_step)
        vectors.check("boundaries", list(zip(self.schedule.starts, self.schedule.ends)))
        validated = {str(step) for step in range(total + 1) if step == total or self.schedule.at(step).validate}
        assert {step for step, in vectors.find(r"val_loss\.(\d+)")} == validated, "validation at other steps"
        for step in range(total):
            self.check_validation(step)
            self.check_values(step, self.schedule.at(step))
            self.check_step(step, self.schedule.at(step))
        self.check_validation(total)
        if self.fabric.rank == 0:
            vectors.finish()

    def check_validation(self, step: int) -> None:
        if f"val_loss.{step}" in self.vectors:
            values = self.schedule.at(step)
            self.vectors.check(f"val_windows.{step}", [values.short_window, values.long_window])
            batches = self.batches("val_{}", [values])
            self.vectors.check(f"val_loss.{step}", self.executor.evaluate(batches, values))

    def check_values(self, step: int, values: tg.Values) -> None:
        rotary = (*every_frequency(values.rotary), values.rotary.attn_scale)
        windows = values.short_window, values.long_window
        for name, got in dict(mtp=values.mtp_weights, windows=windows, yarn=rotary * 2, momentum=values.momentum,
                              adam_step=values.adam_step, lr_mul=self.schedule.lr_factor_at(step)).items():
            self.vectors.check(f"{name}.{step}", got)
        for row in tg.parameter_table(self.cfg):
            lr = values.adam_lr * row.lr_mul
            if row.optimizer == "normuon":                               # the factor of the shape
                height, width = row.shape[-2:]
                lr = values.normuon_lr * (1 if row.label == "attn" else max(1, height / width) ** 0.5)
            self.vectors.check(f"lr.{step}.{row.label}", lr)

    def check_step(self, step: int, values: tg.Values) -> None:
        vectors, world = self.vectors, self.fabric.world
        sums = self.executor.forward_backward(self.ready.pop(0), values).slot_sums
        by_rank = self.fabric.gather(sums.tolist())
        vectors.check(f"slot_loss.{step}", [by_rank[k % world][k // world] for k in range(self.cfg.num_slots)])
        for row in tg.parameter_table(self.cfg):                         # sums over slots; the optimizer divides them
            grad = gradient(self.executor, row.label).clone()
            if world > 1:
                dist.all_reduce(grad)
            grad = grad / self.cfg.num_slots
            vectors.check(f"grad_samp.{step}.{row.label}", grad, row.label, at=vectors[f"idx.{row.label}"])
            vectors.check(f"grad_norm.{step}.{row.label}", grad.double().norm())
        self.ready = self.ready or self.cycle(step + 1)
        self.executor.optim_step(values, lambda: self.ready[0].plans if self.ready else None)     # as the loader tells
        after = self.schedule.at(step + 1)
        vectors.check(f"split_after.{step}", not after.tied)
        state = self.executor.whole_state(after)
        for row in tg.parameter_table(self.cfg):
            self.check_state(step + 1, row, after, state)

    def check_state(self, done: int, row: tg.Parameter, after: tg.Values, state: dict[str, dict]) -> None:
        """Compare a parameter and its moments after so many steps; `after` is of the next."""
        vectors, label = self.vectors, row.label
        at, p = vectors[f"idx.{label}"], state["weights"][label]
        if p is None:                                                    # another rank has it
            return
        vectors.check(f"samp.{done}.{label}", p, label, at)
        vectors.check(f"full.{done}.{label}", p, label)
        vectors.check(f"norm.{done}.{label}", p.double().norm())
        for name, moment in (("st_m", "m"), ("st_v", "v"), ("st_mom", "momentum")):
            if f"{label}.{moment}" in state["moments"]:
                vectors.check(f"{name}.{done}.{label}", state["moments"][f"{label}.{moment}"], label, at)
        if row.optimizer == "adam":
            updates = 0 if label == "embed" and after.tied else done // self.cfg.adam_every
            vectors.check(f"st_step.{done}.{label}", updates)
        elif (key := f"st_v2.{done}.{label}") in vectors:
            at = np.arange(len(vectors[key])) * self.meta["st_v2_stride"][label]
            vectors.check(key, state["moments"][f"{label}.second"], label, at)

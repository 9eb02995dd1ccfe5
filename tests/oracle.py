"""train_gpt.py against reference vectors: one check per file of a directory of vectors.

The vectors are numbers that the original trainer of recipe A computed on a CPU in float64. A directory holds meta.json
(every dimension and constant) and .npz files; which keys and steps exist is read from the files. Nothing here knows a
size. A check computes what the keys name, in the order of the computation, and raises Mismatch at the first array that
is off, so the key in the message names the culprit. `Vectors.finish` then insists that no array was forgotten.
"""
from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import add_grad, grad_of
from torch import Tensor

import train_gpt as tg

ROOT = Path(__file__).resolve().parent.parent
EXTRACT = ROOT / "tests/vectors"                                     # made by make_vectors.py
WHOLE = ROOT / os.environ.get("ORACLE_DIR", "../shared/oracle/a")

# Limits of the largest error over the largest absolute value of an array (over 1 if all are 0), as published with the
# vectors: precision of the run, file, keys, limit for arrays stored as f64, and for those that were rounded to f32 when
# stored. The first row that fits counts; keys without a row are not compared in that precision. Integers must be equal.
TOLERANCES = (
    ("float64", "s_*",      "*",            1e-10, 2e-7),
    ("float64", "traj",     "*_loss.*",     1e-11, None),
    ("float64", "traj",     "*",            1e-9,  None),
    ("float64", "fp8",      "*.mixed.grad_[xw]*", 0.25, 0.25),           # e5m2 first, then the factors by position
    ("float64", "fp8",      "*",            1e-10, 2e-7),
    ("float64", "*",        "*",            1e-11, 2e-7),
    ("float32", "s_inputs", "*",            5e-5,  None),                # rotary tables
    ("float32", "s_acts",   "*factor*",     5e-5,  None),
    ("float32", "s_acts",   "*loss_m?",     1e-6,  None),
    ("float32", "s_acts",   "*eval_loss",   1e-6,  None),
    ("float32", "s_*",      "*",            1e-5,  1e-5),
    ("float32", "traj",     "*_loss.*",     2e-6,  None),
    ("float32", "traj",     "samp.*",       1e-3,  None),
    ("float32", "traj",     "norm.*",       1e-4,  None),
    ("float32", "traj",     "grad_samp.*",  5e-3,  None),
    ("float32", "traj",     "grad_norm.*",  5e-3,  None),
    ("float32", "traj",     "full.*",       2e-2,  None),
)


class Mismatch(AssertionError):
    """An array that is off."""

    def __init__(self, file: str, key: str, error: object, limit: object) -> None:
        super().__init__(f"{file}: {key}: error {error}, limit {limit}")
        self.key = key


class Vectors:
    """The arrays of one file, which of them were used, and the comparison."""

    def __init__(self, oracle: Oracle, file: str) -> None:
        meta = oracle.meta
        self.file, self.dtype, self.unused_scalars = file, oracle.dtype, meta["padding"]["unused_scalars"]
        self.compares = True                                             # or does another rank?
        with np.load(oracle.path / f"{file}.npz") as arrays:
            self.arrays = dict(arrays)
        skipped = meta["padding"]["skip_keys"] + meta["loader"]["peer_shard_end_rule"]
        self.expected = {key for key in self.arrays if not any(fnmatch.fnmatchcase(key, glob) for glob in skipped)}
        self.left, self.compared, self.worst = set(self.expected), set(), {}

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def __getitem__(self, key: str) -> np.ndarray:
        """An input of the computation."""
        self.left.discard(key)
        return self.arrays[key]

    def find(self, pattern: str) -> list[tuple[str, ...]]:
        """Groups of the keys that match a regular expression, each once, in the order of the file."""
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
            got, want = got.ravel()[at[keep]], want.ravel()[keep]        # the vectors' padding is left out
        if got.shape != want.shape:
            raise Mismatch(self.file, key, f"shape {got.shape}", want.shape)
        self._compare(key, got, want)

    def _compare(self, key: str, got: np.ndarray, want: np.ndarray) -> None:
        limit = self._limit(key, want.dtype)
        if limit is None:
            return
        self.compared.add(key)
        exact = got.astype(np.float64), want.astype(np.float64)
        error = float(np.abs(exact[0] - exact[1]).max(initial=0) / (np.abs(exact[1]).max(initial=0) or 1))
        if not error <= limit:                                           # NaN is an error too
            raise Mismatch(self.file, key, f"{error:.2e}", limit)
        stored = str(want.dtype)
        self.worst[stored] = max(self.worst.get(stored, (-1.0, "")), (error, key))

    def _limit(self, key: str, stored: np.dtype) -> float | None:
        if stored.kind != "f":
            return 0.0
        names = self.dtype, self.file, key
        rows = (limits for *globs, f64, f32 in TOLERANCES for limits in [(f64, f32)]
                if all(map(fnmatch.fnmatchcase, names, globs)))
        return next(rows, (None, None))[stored == np.float32]

    def finish(self) -> None:
        """Every array was compared or went into the computation."""
        worst = ", ".join(f"{stored} {error:.1e} ({key})" for stored, (error, key) in sorted(self.worst.items()))
        print(f"{self.file} in {self.dtype}: {len(self.compared)} of {len(self.arrays)} arrays compared, worst {worst}")
        assert not self.left, f"{self.file}: nothing looks at {sorted(self.left)}"


@dataclass(frozen=True)
class Oracle:
    """A directory of vectors, and the precision in which the trainer computes them."""
    path: Path
    dtype: str = "float64"
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
        """Recipe and sizes of a section of meta.json. A field of the same name is taken over, `more` wins."""
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
        own = dict(padded_vocab=sizes.get("vocab_size", 0), dtype=self.dtype, row_comms=self.row_comms, head="plain",
                   device="cpu", stages=stages)
        taken = {name: value for name, value in {**recipe, **sizes}.items() if name in same}
        return tg.Config(**{**taken, **renamed, **own, **more})


CPU = tg.Fabric(torch.device("cpu"))


def executor_with(cfg: tg.Config, stored: Vectors, fabric: tg.Fabric = CPU) -> tg.Executor:
    """An executor with the stored parameters; banks are cut to the trainer's number of layers, tables to its rows."""
    executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    with torch.no_grad():
        for row in executor.model.table.values():
            p = executor.model.get_parameter(row.label)
            if f"zero.{row.label}" in stored:
                assert tuple(stored[f"zero.{row.label}"]) == row.shape, row.label
                p.zero_()
                continue
            if f"p32.{row.label}" in stored:
                whole = torch.from_numpy(stored[f"p32.{row.label}"])
            elif f"p16.{row.label}" in stored:
                whole = bf16(stored[f"p16.{row.label}"])[:row.shape[0]]
            else:
                assert row.label == "embed", f"no initial value of {row.label}"
                whole = executor.model.lm_head.t()                       # tied, and the last row of the table
            mine = whole[fabric.rank::fabric.world] if row.label in executor.tables else whole
            p[:len(mine)] = mine
    return executor


def logical_rows(batch: tg.Batch, label: str) -> Tensor:
    """Rows of a table that a batch reads, as files and recipes number them."""
    plan, rows = batch.plans[label], batch.rows[label].long()
    alone = len(plan.send_counts) == 1                                    # its index is of the table, not of a list
    return rows if alone else logical(plan, plan.my_rows[rows])


def logical(plan: tg.TablePlan, physical: Tensor) -> Tensor:
    """Owner by owner, and each has every W-th row."""
    return physical % plan.shard_size * len(plan.send_counts) + physical // plan.shard_size


def whole_gradient(table: tg.RowTable) -> Tensor:
    """(R, D): what this rank has gathered since the last update, row by row; 0 for rows that it does not read."""
    if table.alone:
        return table.grad
    plan, = table.pending
    count = len(plan.my_rows)
    whole = table.row_grads.new_zeros(len(table.shard) * len(plan.send_counts), table.shard.shape[1])
    assert not table.row_grads[count:].any(), "gradients of no plan"
    whole[logical(plan, plan.my_rows)] = table.row_grads[:count]
    return whole[:table.table.rows]


def of_owners(slices: Sequence[Tensor], rows: int) -> Tensor:
    """(rows, D) from every owner's slice."""
    return torch.stack(list(slices), dim=1).flatten(0, 1)[:rows]


def bf16(words: np.ndarray) -> Tensor:
    return torch.from_numpy((words.astype(np.uint32) << 16).view(np.float32))


def bf16_words(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def every_frequency(rotary: tg.Rotary) -> np.ndarray:
    """Of each channel of a head: neighbours share one, the second half does not rotate."""
    pairs = np.repeat(rotary.frequencies, 2)
    return np.append(pairs, np.zeros_like(pairs))


def rotary_factors(model: tg.GPT) -> tuple[Tensor, Tensor]:
    """The tables of a model for each channel: cosine, and sine with odd channels negated."""
    return model.rotary_cos, model.rotary_sin


def slots_of(tokens: np.ndarray, targets: np.ndarray, cu_seqlens: np.ndarray) -> list[tg.Slot]:
    """From stored (slots, T) arrays; a row of cu_seqlens counts by the borders it names, however often."""
    return [tg.Slot(np.append(inputs, last).astype(np.int32), np.unique(borders).astype(np.int32))
            for inputs, last, borders in zip(tokens, targets[:, -1], cu_seqlens)]


def linear_signature(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Names for the arguments of F.linear, which is not written in Python."""
    raise NotImplementedError


@contextlib.contextmanager
def spying(*places: tuple[Any, str]) -> Iterator[dict[str, list[SimpleNamespace]]]:
    """Calls of functions, by name, in order: their arguments by name and `out`. Tensors keep their gradients."""
    calls: dict[str, list[SimpleNamespace]] = {name: [] for _, name in places}

    def spy(function: Any, record: list) -> Any:
        signature = inspect.signature(linear_signature if function is F.linear else function)

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            out = function(*args, **kwargs)
            for x in (*arguments.values(), out):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.retain_grad()
            record.append(SimpleNamespace(**arguments, out=out))
            return out
        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            patch.setattr(owner, name, spy(getattr(owner, name), calls[name]))
        yield calls

# ----------------------------------------------------------------------------------------------------------------------
# Config S: one slot forward and backward
# ----------------------------------------------------------------------------------------------------------------------

class ConfigS:
    """One slot with known parameters and everything that goes through the model."""

    def __init__(self, oracle: Oracle) -> None:
        sizes = self.sizes = oracle.meta["config_s"]
        assert sizes["num_layers"] == len(tg.LAYERS), "another layer table"
        self.stored, length = oracle.open("s_inputs"), sizes["slot_tokens"]
        cfg = oracle.config("config_s", [length] * len(oracle.meta["recipe"]["windows_blocks"]), num_slots=1,
                            max_doc_len=length, val_batch_tokens=length)
        self.executor = executor_with(cfg, self.stored)
        self.model, self.long_window = self.executor.model, sizes["long_window"]
        self.values = replace(tg.Schedule(cfg).at(0), short_window=sizes["short_window"], long_window=self.long_window)
        self.batch = self.batch_with(self.stored["cu_seqlens"])

    def batch_with(self, cu_seqlens: np.ndarray) -> tg.Batch:
        tokens, targets = (self.stored[name][None] for name in ("tokens", "targets"))
        slots = slots_of(tokens, targets, cu_seqlens[None])
        return self.executor.planner.batches("oracle", [self.values], [slots])[0]

    def gradient(self, label: str) -> Tensor:
        return grad_of(self.executor.optimizer, label)

    def forward_backward(self, values: tg.Values, batch: tg.Batch | None = None) -> dict[str, list[SimpleNamespace]]:
        """Gradients of one slot, and the calls of its forward pass."""
        self.executor.drop_gradients()
        with spying((F, "linear"), (tg, "rms_norm"), (tg, "relu_sq_mlp"), (tg, "softcap"), (tg.GPT, "inputs"),
                    (self.model, "attention"), (self.executor, "model_losses")) as calls:
            self.executor.forward_backward(batch or self.batch, values)
        return calls

    def weighted(self, name: str) -> tg.Values:
        return replace(self.values, mtp_weights=tuple(self.stored[f"mtp_{name}"]))

    def yarn1(self, name: str) -> tg.Values:
        """After one change of the windows."""
        short, long = self.sizes["yarn1_windows"]
        stages = [tg.STAGES[0]._replace(long_window=window) for window in (self.long_window, long)]
        _, rotary = tg.rotary_by_stage(replace(self.executor.cfg, stages=stages, window_block=1))
        return replace(self.weighted(name), short_window=short, long_window=long, rotary=rotary)

    def check_rotary(self, vectors: Vectors, prefix: str, values: tg.Values) -> None:
        """Tables as the last pass, with these values, has left them; paired ones have two positions in a row."""
        vectors.check(f"{prefix}.angular_freq", every_frequency(values.rotary))
        vectors.check(f"{prefix}.attn_scale", [values.rotary.attn_scale] * 2)
        length = self.batch.tokens.shape[1]
        for name, table in zip(("factor1", "factor2"), rotary_factors(self.model)):
            vectors.check(f"{prefix}.{name}", table[:length])
            vectors.check(f"{prefix}.paired_{name}", table[:2 * length].view(length, -1))

    def mixes(self, calls: dict[str, list[SimpleNamespace]]) -> list[Tensor]:
        """The stream behind the mix of each layer: what is normalised for attention, or else for the MLP."""
        source = {id(call.out): call.x for call in calls["rms_norm"]}
        inputs = [call.n for call in calls["relu_sq_mlp"]]
        for depth, call in zip(tg.ATTENTION_LAYERS, self.linears(calls, 3 * self.sizes["model_dim"])):
            inputs[depth] = call.x
        return [source[id(n)] for n in inputs]

    def linears(self, calls: dict[str, list[SimpleNamespace]], outputs: int) -> list[SimpleNamespace]:
        """Calls of the linear maps from the stream's width to `outputs`, one for each attention layer."""
        return [call for call in calls["linear"] if call.weight.shape == (outputs, self.sizes["model_dim"])]

    @torch.no_grad()
    def activations(self, calls: dict[str, list[SimpleNamespace]]) -> Iterator[tuple[str, Tensor]]:
        """(name, (T, ...)) in forward order."""
        x0, streams, _ = calls["inputs"][0].out
        _, pairs = streams[0]
        smeared = next(call.x for call in calls["rms_norm"] if call.out is x0)
        scalars = dict(zip(tg.SCALARS, self.model.scalars.split(list(map(len, tg.SCALARS.values())))))
        outputs = self.linears(calls, self.sizes["model_dim"])           # (D, D): the output matrices of attention
        attentions = dict(zip(tg.ATTENTION_LAYERS, zip(calls["attention"], outputs)))
        yield "embed", F.embedding(self.batch.tokens, self.model.embed)[0]
        yield from (("smear", smeared[0]), ("x0", x0[0]), ("x0_bigram", pairs[0]))
        x, kept = x0, {}
        for depth, (layer, mix, mlp) in enumerate(zip(tg.LAYERS, self.mixes(calls), calls["relu_sq_mlp"])):
            if layer.add:                                                # undo the mix, which is linear in it
                others = self.model.x0_lambdas[depth] * x0 + scalars["bigram"][depth] * pairs
                added, stream = (mix - others) / scalars["residual"][depth], kept[layer.add]
                gate = ((added - x) * stream).sum(-1, keepdim=True) / stream.square().sum(-1, keepdim=True)
                yield from (("skip_gate_out", gate[0]), ("after_skip", added[0]))
            yield f"mix{depth}", mix[0]
            x = mix
            if depth in attentions:
                kernel, output = attentions[depth]
                per_head = (-1, self.model.heads, self.model.head_dim)
                for name, value in dict(q=kernel.q, k=kernel.k, v=kernel.v, y=kernel.out.view(per_head),
                                        yg=output.x.view(per_head), attn=output.out[0]).items():
                    yield f"{name}{depth}", value
                x = x + output.out
            yield f"mlp{depth}", mlp.out[0]
            x = x + mlp.out
            kept[layer.keep_as] = x
        last, capped, targets = calls["rms_norm"][-1], calls["softcap"][0], self.batch.targets.flatten()
        yield from (("after_backout", last.x[0]), ("final_norm", last.out[0]))
        raw_logits = last.out[0] @ self.model.lm_head                         # the backward has overwritten its own
        yield from (("raw_logits", raw_logits), ("logits", capped.out))
        losses = tg.next_token_losses(last.out[0], self.model.lm_head, targets)
        yield "lse", losses + capped.out.gather(1, targets[:, None])[:, 0]

    def logit_gradient(self, raw: Tensor, values: tg.Values) -> Tensor:
        """Gradient of the loss by the raw logits: with the identity as head they are its input."""
        raw = raw.detach().requires_grad_()
        identity, one = torch.eye(raw.shape[1], dtype=raw.dtype), torch.ones((), dtype=raw.dtype)
        weights = torch.tensor(values.mtp_weights, dtype=raw.dtype)
        losses = tg.HeadLoss.apply(raw, identity, self.batch.targets, weights, one, "plain", raw.dtype,
                                   tg.as_part(identity))
        return torch.autograd.grad(losses.sum(), raw)[0]


def check_s_inputs(oracle: Oracle) -> None:
    s, vectors = ConfigS(oracle), oracle.open("s_inputs")
    sizes = s.sizes
    names = ("num_heads", "head_dim", "model_dim", "num_layers", "vocab_size", "bigram_rows", "window_block",
             "slot_tokens", "peer_rotary_length")
    vectors.check("dims", [sizes[name] for name in names])
    vectors.check("ws", [sizes["short_window"], sizes["long_window"]])
    vectors.check("bos", sizes["document_start"])
    vectors.check("tokens", s.batch.tokens[0])
    vectors.check("targets", s.batch.targets[0])
    vectors.check("bigram_ids", s.batch.rows["bigram_embed"][0])
    for name, in vectors.find("mtp_(.*)"):
        vectors.check(f"mtp_{name}", s.weighted(name).mtp_weights)
    s.forward_backward(s.values)
    s.check_rotary(vectors, "yarn0", s.values)
    vectors.left -= set(s.stored.arrays) - s.stored.left                  # what went into the model
    vectors.finish()


def check_s_acts(oracle: Oracle) -> None:
    s, vectors = ConfigS(oracle), oracle.open("s_acts")
    rows = vectors["rows16"]
    values = s.weighted("m3")
    calls = s.forward_backward(values)
    seen = dict(check_activations(s, vectors, calls))
    for name, in vectors.find("losses_(.*)"):
        check_losses(s, vectors, "", name, calls if name == "m3" else s.forward_backward(s.weighted(name)))
    vectors.check("grad_logits_rows16", s.logit_gradient(seen["raw_logits"], values)[rows])
    stream = {f"mix{depth}": mix for depth, mix in enumerate(s.mixes(calls))}
    stream["final_norm"] = calls["rms_norm"][-1].out
    for name, x in reversed(stream.items()):
        grad = x.grad[0]
        vectors.check(f"grad_rows16.{name}", grad[rows])
        vectors.check(f"grad_sumsq.{name}", grad.double().square().sum())

    def evaluate(prefix: str, values: tg.Values, batch: tg.Batch) -> None:
        with spying((tg, "rms_norm")) as calls:
            vectors.check(f"{prefix}eval_loss", s.executor.evaluate([batch], values))
        vectors.check(f"{prefix}eval_final_norm_rows16", calls["rms_norm"][-1].out[0][rows])

    evaluate("", values, s.batch)
    one_document = s.batch_with(np.asarray([0, s.batch.tokens.shape[1]]))
    long = s.forward_backward(values, one_document)
    list(check_activations(s, vectors, long, "long."))
    check_losses(s, vectors, "long.", "m3", long)
    evaluate("long.", values, one_document)

    values = s.yarn1("m2")
    yarn1 = s.forward_backward(values)
    vectors.check("yarn1.windows", [values.short_window, values.long_window])
    s.check_rotary(vectors, "yarn1", values)
    list(check_activations(s, vectors, yarn1, "yarn1."))
    check_losses(s, vectors, "yarn1.", "m2", yarn1)
    vectors.finish()


def check_activations(s: ConfigS, vectors: Vectors, calls: dict, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Variants hold some rows only, under the plain name. Passes the activations on."""
    rows = vectors["rows16"]
    for name, x in s.activations(calls):
        vectors.check(prefix + name, x[rows] if prefix else x)
        vectors.check(f"{prefix}{name}_rows16", x[rows])
        vectors.check(f"{prefix}sumsq.{name}", x.double().square().sum())
        yield name, x


def check_losses(s: ConfigS, vectors: Vectors, prefix: str, name: str, calls: dict) -> None:
    losses = calls["model_losses"][0].out[0]
    vectors.check(f"{prefix}losses_{name}", losses)
    vectors.check(f"{prefix}loss_{name}", losses.sum())


def check_s_grads(oracle: Oracle) -> None:
    s, vectors = ConfigS(oracle), oracle.open("s_grads")
    for name, in vectors.find(r"norm_(\w+)\..*"):
        s.forward_backward(s.weighted(name))
        for row in reversed(s.model.table.values()):
            label, grad = row.label, s.gradient(row.label)
            if name == "m3":                                              # the others hold samples and small parameters
                check_whole_gradient(vectors, label, grad)
            vectors.check(f"g_{name}.{label}", grad, label)
            vectors.check(f"sval_{name}.{label}", grad, label, at=vectors[f"sidx.{label}"])
            vectors.check(f"norm_{name}.{label}", grad.double().norm())
    s.forward_backward(s.yarn1("m2"))
    for label, in vectors.find(r"yarn1\.g_m2\.(.*)"):
        vectors.check(f"yarn1.g_m2.{label}", s.gradient(label), label)
    vectors.finish()


def check_whole_gradient(vectors: Vectors, label: str, grad: Tensor) -> None:
    for kind in ("g", "g32"):
        vectors.check(f"{kind}.{label}", grad, label)
    if f"grows.{label}" in vectors:                                       # a table: all other rows are exactly 0
        rows = grad.any(dim=1).nonzero()[:, 0]
        vectors.check(f"grows.{label}", rows)
        vectors.check(f"gvals.{label}", grad[rows])

# ----------------------------------------------------------------------------------------------------------------------
# Trajectory: whole steps through the executor
# ----------------------------------------------------------------------------------------------------------------------

class Trajectory:
    """A run of a few steps through every stage, change of the windows and the split, on stored tokens.

    Ranks of a process group share it: each computes its slots and updates its part, and rank 0 compares the whole.
    """

    def __init__(self, oracle: Oracle, fabric: tg.Fabric = CPU) -> None:
        meta = self.meta = oracle.meta["trajectory"]
        assert meta["num_layers"] == len(tg.LAYERS), "another layer table"
        self.vectors, self.stored = oracle.open("traj"), oracle.open("traj_init")
        self.vectors.compares, self.parts = fabric.rank == 0, []
        num_slots = oracle.meta["recipe"]["num_slots"]
        val_batch_tokens = meta["val_slot_tokens"] * num_slots
        self.cfg = oracle.config("trajectory", meta["slot_tokens"], val_batch_tokens=val_batch_tokens)
        self.schedule, self.fabric = tg.Schedule(self.cfg), fabric
        self.executor = executor_with(self.cfg, self.stored, fabric)
        self.ready = self.cycle(0)                                       # batches of the cycle that are not yet used

    def batches(self, pattern: str, steps: Sequence[tg.Values]) -> list[tg.Batch]:
        """This rank's slots of each step, planned together; the pattern is that of the keys of a step."""
        mine, all_rows, (rank, world) = [], [], (self.fabric.rank, self.fabric.world)
        for values in steps:
            names = [pattern.format(name, values.step) for name in ("tokens", "targets", "bigram_ids", "cu_seqlens")]
            slots = slots_of(*(self.vectors[names[k]] for k in (0, 1, 3)))
            batch, = tg.Planner(self.cfg, CPU).batches("oracle", [values], [slots])
            for name, made in zip(names, (batch.tokens, batch.targets, batch.rows["bigram_embed"])):
                self.vectors.check(name, made)
            mine.append(slots[rank::world])
            all_rows.append(batch.rows)
        made = self.executor.planner.batches("oracle", steps, mine)
        for batch, rows in zip(made, all_rows):
            for label, of_all in rows.items():
                assert logical_rows(batch, label).equal(of_all[rank::world].long()), f"other rows of {label}"
        return made

    def cycle(self, step: int) -> list[tg.Batch]:
        """Of the step and those that share its plans: one more, but for the last cycle."""
        last = min(step + self.cfg.adam_every, self.schedule.total_steps)
        return self.batches("{}.{}", [self.schedule.at(k) for k in range(step, last)]) if step < last else []

    def check_part(self, key: str, part: Tensor, label: str = "", at: np.ndarray | None = None, owned: bool = False
                   ) -> None:
        """Compare the sum of all ranks' parts, or, if owned, the rows of which rank r has the r-th of W slices."""
        if self.fabric.world == 1:
            self.vectors.check(key, part, label, at)
            return
        optimizer, start, size = self.executor.optimizer, 0, part.numel()
        if owned and label in self.executor.tables:                      # every W-th row
            slices = [torch.zeros_like(part)] * self.fabric.world
            slices[self.fabric.rank] = part
            part = of_owners(slices, self.executor.tables[label].table.rows)
            owned, size = False, part.numel()
        if owned and optimizer.model.table[label].parts:
            entry, width = optimizer.entries[label], int(np.prod(part.shape[1:]))
            units = len(tg.bank_matrices(entry.row, entry.weight.data))
            start, size = entry.slice.start * width, units * width
        at = np.arange(size) if at is None else at
        mine, samples = (at >= start) & (at < start + part.numel()), part.new_zeros(len(at))
        if not owned or optimizer.model.table[label].parts or self.fabric.rank == 0:
            samples[mine] = part.flatten()[at[mine] - start]
        self.parts.append((key, label, at, size, samples))

    def join_parts(self) -> None:
        """Add up what check_part has put off, in one message to rank 0, and compare it there."""
        if not self.parts:
            return
        together = torch.cat([samples for *_, samples in self.parts])
        dist.reduce(together, dst=0)
        for (key, label, at, size, _), got in zip(self.parts, together.split([len(at) for _, _, at, *_ in self.parts])):
            whole, inside = got.new_zeros(size), at < size
            whole[at[inside]] = got[inside]
            self.vectors.check(key, whole, label, at)
        self.parts.clear()

    def check(self) -> None:
        self.check_plan()
        for step in range(self.schedule.total_steps):
            self.check_validation(step)
            self.check_step(step, self.schedule.at(step))
        self.check_validation(self.schedule.total_steps)
        if self.fabric.world > 1:                                        # no rank has the whole gradient
            self.vectors.left -= {key for key in self.vectors.left if key.startswith("grad_norm.")}
        self.stored.finish()
        self.vectors.finish()

    def check_plan(self) -> None:
        vectors, schedule = self.vectors, self.schedule
        vectors.check("dims", [self.meta[name] for name in self.meta["dims_key_order"]])
        vectors.check("bos", self.cfg.document_start)
        vectors.check("split_step", schedule.untie_step)
        vectors.check("boundaries", list(zip(schedule.starts, schedule.ends)))
        total = schedule.total_steps
        validated = {str(step) for step in range(total + 1) if step == total or schedule.at(step).validate}
        assert {step for step, in vectors.find(r"val_loss\.(\d+)")} == validated, "validation at other steps"

    def check_validation(self, step: int) -> None:
        values = self.schedule.at(step)
        if f"val_loss.{step}" in self.vectors:
            self.vectors.check(f"val_windows.{step}", [values.short_window, values.long_window])
            batches = self.batches("val_{}", [values])
            assert len(batches[0].tokens) == self.cfg.num_slots // self.fabric.world, "not this rank's slots"
            self.vectors.check(f"val_loss.{step}", self.executor.evaluate(batches, values))

    def check_step(self, step: int, values: tg.Values) -> None:
        self.check_values(step, values)
        slot_sums = self.executor.forward_backward(self.ready.pop(0), values).slot_sums
        of_all = slot_sums.new_zeros(self.cfg.num_slots)
        of_all[self.fabric.rank::self.fabric.world] = slot_sums
        self.check_part(f"slot_loss.{step}", of_all)
        for label in self.executor.optimizer.model.table:                  # sums over slots; the optimizer divides them
            grad = self.gradient(label) / self.cfg.num_slots
            self.check_part(f"grad_samp.{step}.{label}", grad, label, at=self.vectors[f"idx.{label}"])
            if self.fabric.world == 1:
                self.vectors.check(f"grad_norm.{step}.{label}", grad.double().norm())
        self.ready = self.ready or self.cycle(step + 1)
        self.executor.optim_step(values, lambda: self.ready[0].plans if self.ready else None)     # as the loader tells
        after = self.schedule.at(step + 1)
        self.vectors.check(f"split_after.{step}", not after.tied)
        weights = self.executor.whole_weights(after)
        for label in self.executor.optimizer.model.table:
            count = 0 if label == "embed" and after.tied else (step + 1) // self.cfg.adam_every
            self.check_state(step + 1, label, weights[label], count)
        self.join_parts()

    def gradient(self, label: str) -> Tensor:
        """This rank's, of all rows of a table."""
        if label in self.executor.tables:
            return whole_gradient(self.executor.tables[label])
        return grad_of(self.executor.optimizer, label)

    def check_values(self, step: int, values: tg.Values) -> None:
        vectors, optimizer = self.vectors, self.executor.optimizer
        rotary = (*every_frequency(values.rotary), values.rotary.attn_scale)
        windows = values.short_window, values.long_window
        for name, got in dict(mtp=values.mtp_weights, windows=windows, yarn=rotary * 2,
                              momentum=values.momentum, adam_step=values.adam_step).items():
            vectors.check(f"{name}.{step}", got)
        vectors.check(f"lr_mul.{step}", self.schedule.lr_factor_at(step))
        for label, row in optimizer.model.table.items():
            lr = values.normuon_lr if row.optimizer == "normuon" else values.adam_lr
            vectors.check(f"lr.{step}.{label}", lr * rate_factor(optimizer, label))

    def check_state(self, done: int, label: str, p: Tensor | None, updates: int) -> None:
        """p: the whole weight, on rank 0 at least, which compares; updates: by Adam so far."""
        vectors, optimizer = self.vectors, self.executor.optimizer
        at, p = vectors[f"idx.{label}"], torch.zeros(()) if p is None else p
        state, stride = optimizer.state[label], self.meta["st_v2_stride"].get(label)
        vectors.check(f"samp.{done}.{label}", p, label, at)
        vectors.check(f"full.{done}.{label}", p, label)
        vectors.check(f"norm.{done}.{label}", p.double().norm())
        for name, moment in (("st_m", "m"), ("st_v", "v"), ("st_mom", "momentum")):
            if moment in state:
                self.check_part(f"{name}.{done}.{label}", state[moment], label, at, owned=True)
        if "second" in state:
            if (key := f"st_v2.{done}.{label}") in vectors:
                at = np.arange(len(vectors[key])) * stride
                self.check_part(key, state["second"], label, at, owned=True)
        else:
            vectors.check(f"st_step.{done}.{label}", updates)


def rate_factor(optimizer: tg.Optimizer, label: str) -> float:
    """A parameter's factor of the learning rate; of a bank its first matrix's, which is no down matrix."""
    row = optimizer.model.table[label]
    return float(optimizer.entries[label].lr_muls[0]) if row.optimizer == "normuon" else row.lr_mul


def check_traj(oracle: Oracle) -> None:
    Trajectory(oracle).check()

# ----------------------------------------------------------------------------------------------------------------------
# Optimizer
# ----------------------------------------------------------------------------------------------------------------------

def check_opt(oracle: Oracle) -> None:
    vectors = oracle.open("opt")
    for case, in vectors.find(r"pe_in\.(.*)"):
        x = torch.from_numpy(vectors[f"pe_in.{case}"])
        vectors.check(f"pe_out.{case}", tg.polar_express(x.view(-1, *x.shape[-2:])).view(x.shape))
    for case, in vectors.find(r"(nm_\w+)\.p0"):
        check_normuon(vectors, case)
    check_mantissa(vectors)
    check_adam(oracle, vectors)
    vectors.finish()


def check_normuon(vectors: Vectors, case: str) -> None:
    """A bank over a few steps with plain float64 weights."""
    p = torch.from_numpy(vectors[f"{case}.p0"].copy())
    count, height, width = p.shape
    momentum, second = torch.zeros_like(p), p.new_zeros((count, height, 1) if height >= width else (count, 1, width))
    key = f"{case}.per_matrix_lr_mul"
    extra = torch.from_numpy(vectors[key]) if key in vectors else p.new_ones(count)
    for step in range(len(vectors.find(rf"{case}\.(g\d+)"))):
        lr, shape_factor, mu, beta2, weight_decay = torch.from_numpy(vectors[f"{case}.hyper{step}"]).unbind()
        tg.normuon_update(p, None, torch.from_numpy(vectors[f"{case}.g{step}"]), momentum, second, 1.0, mu, lr,
                          (shape_factor * extra).view(-1, 1, 1), lr * weight_decay, float(beta2))
        for name, got in (("mom", momentum), ("v2_", second), ("p", p)):
            vectors.check(f"{case}.{name}{step + 1}", got)


def check_mantissa(vectors: Vectors) -> None:
    """Chained updates of bf16 weights and the 16 bits below them, bit for bit."""
    p, mantissa = (torch.from_numpy(vectors[f"mt.{name}_in"].view(np.int16).copy()) for name in ("p", "m"))
    p, some = p.view(torch.bfloat16), torch.zeros(p.shape)
    for step in range(len(vectors.find(r"mt\.(g\d+)"))):
        decay, lr = torch.from_numpy(vectors[f"mt.wd_lr{step}"]).unbind()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg, "normuon_direction", lambda *_, update=bf16(vectors[f"mt.g{step}"]): update)
            tg.normuon_update(p, mantissa, some, some, some, 1.0, lr, lr, torch.ones_like(lr), decay, 0.0)
        vectors.check(f"mt.p_out{step}", bf16_words(p))
        vectors.check(f"mt.m_out{step}", bf16_words(mantissa))


def check_adam(oracle: Oracle, vectors: Vectors) -> None:
    """The optimizer on a few small parameters, tied and then untied; gradients of an even and an odd step add up."""
    labels = [label for label, in vectors.find(r"adam\.(\w+)\.p_init")]
    weights = {label: torch.nn.Parameter(torch.from_numpy(vectors[f"adam.{label}.p_init"].copy())) for label in labels}
    cfg = oracle.config("trajectory", oracle.meta["trajectory"]["slot_tokens"], num_slots=1)
    found = {row.label: row._replace(shape=tuple(weights[row.label].shape)) for row in tg.parameter_table(cfg)
             if row.label in weights}
    model = SimpleNamespace(table=found, get_parameter=weights.get, lm_head=weights["lm_head"], embed=weights["embed"])
    tables = {label: tg.RowTable(row.rows._replace(rows=len(weights[label])), cfg, CPU, weights[label], 1, tg.no_wait)
              for label, row in found.items() if row.rows}
    updates = dict.fromkeys(labels, 0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("REDUCE_ORDER", "UPDATE_ORDER"):
            patch.setattr(tg, name, tuple(entry for entry in getattr(tg, name) if entry in (*weights, tg.SMALL)))
        patch.setattr(tg, "parameter_table", lambda _: found.values())
        optimizer = tg.Optimizer(cfg, CPU, model, lambda update: update, tables)
        split_step = oracle.meta["opt"]["split_step"]
        for step in range(len(vectors.find(r"adam\.lr_mul\.(\d+)"))):
            adam_lr = cfg.adam_lr * float(vectors[f"adam.lr_mul.{step}"])
            untie = step == split_step
            values = replace(tg.Schedule(cfg).at(step), adam_lr=adam_lr, tied=step <= split_step, untie=untie)
            for label in weights:
                grad = torch.from_numpy(vectors[f"adam.{label}.g{step}"])
                add_grad(optimizer, label, grad, values)
                if values.adam_step and not (label == "embed" and values.tied):
                    updates[label] += 1
            if untie:
                check_embed_state(vectors, optimizer, "before", updates["embed"])
            optimizer.step(values, tg.no_wait)
            if untie:
                updates["embed"] = updates["lm_head"]
                check_embed_state(vectors, optimizer, "after", updates["embed"])
            for label, p in weights.items():
                for name, got in dict(p=p, **optimizer.state[label], t=updates[label]).items():
                    vectors.check(f"adam.{label}.{name}{step}", got)


def check_embed_state(vectors: Vectors, optimizer: tg.Optimizer, when: str, updates: int) -> None:
    for name, got in dict(optimizer.state["embed"], step=updates).items():
        vectors.check(f"adam.split.embed_{name}_{when}", got)

# ----------------------------------------------------------------------------------------------------------------------
# Loader and bigram hash
# ----------------------------------------------------------------------------------------------------------------------

def check_loader(oracle: Oracle) -> None:
    vectors, meta = oracle.open("loader"), oracle.meta["loader"]
    sizes = "slot_tokens", "max_doc_len", "slot_tokens_after", "max_doc_len_after"
    for case, in vectors.find(r"(\w+)\.slot_tokens_maxlen"):
        vectors.check(f"{case}.slot_tokens_maxlen", [meta[case][name] for name in sizes if name in meta[case]])
    vectors.check("val.slot_tokens", [meta["val"]["slot_tokens"]])
    for key, array in vectors.arrays.items():
        if key.endswith("cu_seqlens"):
            vectors.arrays[key] = borders(array, array.shape[-1])
    for case, world in vectors.find(r"(\w+)_w(\d+)\.(?:before\.)?inputs"):
        if any(key.startswith(f"{case}_w{world}.") for key in vectors.expected):
            LoaderCase(oracle, vectors, case, int(world)).check()
    vectors.finish()


def borders(cu_seqlens: np.ndarray | Tensor, columns: int) -> np.ndarray:
    """(..., C) -> (..., columns): each border once, then -1. How often one is repeated is padding, at both ends."""
    rows = np.asarray(cu_seqlens).reshape(-1, np.shape(cu_seqlens)[-1])
    found = [np.unique(row) for row in rows]
    out = np.full((len(rows), max(columns, *map(len, found))), -1, np.int64)
    for row, filled in zip(found, out):
        filled[:len(row)] = row
    return out.reshape(*np.shape(cu_seqlens)[:-1], -1)


class LoaderCase:
    """A stored sequence of blocks: (step, micro-step, rank, tokens). A slot's number is micro-step * W + rank."""

    def __init__(self, oracle: Oracle, vectors: Vectors, case: str, world: int) -> None:
        meta, self.vectors, self.world, self.validation = oracle.meta["loader"], vectors, world, case.startswith("val")
        sizes, num_slots = meta["val" if self.validation else case], meta["num_slots"]
        names = {"": f"{case}_w{world}.", "_before": f"{case}_w{world}.before.", "_after": f"{case}_w{world}.after."}
        self.parts, plan = [], []                                        # (prefix of keys, steps); sizes of each step
        for ending, prefix in names.items():
            if f"{prefix}inputs" in vectors:
                self.parts.append((prefix, len(vectors[f"{prefix}inputs"])))
                after = ending if ending == "_after" else ""
                plan += [(sizes[f"slot_tokens{after}"], sizes.get(f"max_doc_len{after}", 0))] * self.parts[-1][1]
        self.slot_tokens, stages = plan[0][0], len(oracle.meta["recipe"]["windows_blocks"])
        self.cfg = oracle.config("loader", [self.slot_tokens] * stages, vocab_size=tg.GPT2_VOCAB,
                                 padded_vocab=tg.GPT2_VOCAB, num_slots=num_slots,
                                 val_batch_tokens=num_slots * self.slot_tokens,
                                 val_tokens=num_slots * self.slot_tokens * len(plan))
        shards = oracle.path / "loader_shards" / ("val_*.bin" if self.validation else "train_*.bin")
        self.headers = [h._replace(document_start=self.cfg.document_start) for h in tg.find_shards(str(shards))]
        any_values = tg.Schedule(self.cfg).at(0)
        self.steps = [replace(any_values, step=step, slot_tokens=slot_tokens)
                      for step, (slot_tokens, _) in enumerate(plan)]
        self.max_doc_len = [max_doc_len for _, max_doc_len in plan]          # by step

    def check(self) -> None:
        """The pure functions, then what every rank of a run gets."""
        self.compare([list(self.plain_validation() if self.validation else self.plain_packing())])
        fabrics = [tg.Fabric(CPU.device, rank, self.world) for rank in range(self.world)]
        self.compare([list(self.of_rank(fabric)) for fabric in fabrics])

    def plain_packing(self) -> Iterator[tg.Batch]:
        shards = map(tg.load_shard, self.headers)
        shard, doc = next(shards), 0
        for values in self.steps:
            sizes = self.cfg.num_slots, values.slot_tokens, self.max_doc_len[values.step]
            while (packed := tg.pack_block(shard, doc, *sizes)) is None:
                shard, doc = next(shards), 0
            pieces, doc = packed
            yield self.planned(values, [tg.make_slot(shard, *piece) for piece in pieces])

    def plain_validation(self) -> Iterator[tg.Batch]:
        shards, count = map(tg.load_shard, self.headers), self.cfg.num_slots
        slots = tg.validation_slots(shards, count, self.slot_tokens, self.cfg.document_start)
        for values in self.steps:
            yield self.planned(values, [next(slots) for _ in range(count)])

    def planned(self, values: tg.Values, slots: list[tg.Slot]) -> tg.Batch:
        """All slots as those of one rank."""
        return tg.Planner(self.cfg, CPU).batches("oracle", [values], [slots])[0]

    def of_rank(self, fabric: tg.Fabric) -> Iterator[tg.Batch]:
        if self.validation:
            yield from tg.ValidationSet(self.cfg, fabric, self.headers).batches(self.steps[0])
            return

        def cycles() -> Iterator[list[tg.Values]]:
            """Of a step each; the vectors change between steps what a run has once."""
            for values in self.steps:
                loader.cfg = replace(self.cfg, max_doc_len=self.max_doc_len[values.step])
                yield [values]

        loader = tg.Loader(self.cfg, fabric, self.headers, cycles())
        loader.start()
        try:
            for values in self.steps:
                yield loader.next(values)
        finally:
            loader.close()

    def compare(self, batches: list[list[tg.Batch]]) -> None:
        """batches[rank][step], or all slots as those of one rank."""
        done = 0
        for prefix, count in self.parts:
            columns = self.vectors.arrays.get(f"{prefix}cu_seqlens", np.zeros(0)).shape[-1]
            fields = dict(inputs=lambda batch: batch.tokens.numpy(), targets=lambda batch: batch.targets.numpy(),
                          bigram_ids=lambda batch: logical_rows(batch, "bigram_embed").numpy(),
                          cu_seqlens=lambda batch: borders(batch.cu_seqlens, columns))
            for name, field in fields.items():
                slots = np.stack([[field(batch) for batch in of_rank[done:done + count]] for of_rank in batches])
                slots = slots.transpose(1, 2, 0, 3)                      # from (rank, step, micro, tokens)
                self.vectors.check(prefix + name, slots.reshape(count, -1, self.world, slots.shape[-1]))
            done += count


def check_bigram(oracle: Oracle) -> None:
    vectors, rows = oracle.open("bigram"), oracle.meta["bigram"]["rows"]
    vectors.check("table_rows", rows)
    previous, current = (vectors[name].astype(np.int32) for name in ("prev", "cur"))
    in_a_row = np.concatenate([[0, 0], np.stack((previous, current), axis=1).ravel()]).astype(np.int32)
    vectors.check("row", tg.bigram_hash(in_a_row, rows)[3::2])
    vectors.check("first_position_row", tg.bigram_hash(in_a_row, rows)[0])
    second = [tg.bigram_hash(np.asarray([0, token], np.int32), rows)[1] for token in vectors["position1_cur"]]
    vectors.check("position1_row", second)
    vectors.check("sequence_rows", tg.bigram_hash(vectors["sequence"].astype(np.int32), rows))
    vectors.left.discard("n_extremes")                                    # a note: so many of the pairs are extremes
    vectors.finish()

# ----------------------------------------------------------------------------------------------------------------------
# Schedule
# ----------------------------------------------------------------------------------------------------------------------

def check_schedule(oracle: Oracle) -> None:
    vectors, meta = oracle.open("schedule"), oracle.meta["schedule"]
    num_slots = oracle.meta["recipe"]["num_slots"]
    small = dict(num_heads=2, model_dim=2 * meta["head_dim"], vocab_size=16, padded_vocab=16, bigram_rows=16)
    slot_tokens = [tokens // num_slots for tokens in meta["batch_tokens"]]
    cfg = oracle.config("schedule", slot_tokens, **small, dtype="bfloat16")
    schedule = tg.Schedule(cfg)
    every = [schedule.at(step) for step in range(schedule.total_steps + 1)]
    vectors.check("total_steps", schedule.total_steps)
    vectors.check("sched_ext", [cfg.num_scheduled_steps, cfg.num_extension_steps])
    vectors.check("split_step", schedule.untie_step)
    vectors.check("boundaries", list(zip(schedule.starts, schedule.ends)))
    windows = [(v.short_window, v.long_window) for v in every]
    before_growth = windows[-1][0], cfg.stages[every[-1].stage].long_window * cfg.window_block
    for name, got in dict(
            lr_mul=[schedule.lr_factor_at(v.step) for v in every], momentum=[v.momentum for v in every],
            stage=[v.stage for v in every],
            batch_size=[v.slot_tokens * num_slots for v in every], adam_step=[v.adam_step for v in every],
            lr_normuon=[v.normuon_lr for v in every], lr_adam=[v.adam_lr for v in every],
            tied_during_update=[not any(v.untie for v in every[:v.step]) for v in every],
            windows_train=[*windows[:-1], before_growth], windows_final_validation=windows[-1]).items():
        vectors.check(name, got)
    check_token_weights(vectors, every)
    check_yarn(vectors, cfg, schedule)
    optimizer = tg.Executor(replace(cfg, model_dim=16, head_dim=8), CPU, tg.attention_reference, "plain").optimizer
    for label in optimizer.model.table:
        vectors.check(f"lr_mul_param.{label}", rate_factor(optimizer, label))
    vectors.finish()


def check_token_weights(vectors: Vectors, every: list[tg.Values]) -> None:
    counts = [len(v.mtp_weights) for v in every]
    vectors.check("mtp_count", counts)
    for name in ("mtp", "mtp_f32"):
        got = vectors[name].astype(np.float64)                            # columns beyond the count are padding
        for row, values in zip(got, every):
            row[:len(values.mtp_weights)] = values.mtp_weights
        vectors.check(name, got)


def check_yarn(vectors: Vectors, cfg: tg.Config, schedule: tg.Schedule) -> None:
    """Frequencies and scale at the start and after each change of the long window, and the bf16 tables at the end."""
    windows = [stage.long_window * cfg.window_block for stage in cfg.stages]
    changes = [k for k in range(1, len(windows)) if windows[k] != windows[k - 1]]
    vectors.check("yarn_window_pairs", [(windows[k - 1], windows[k]) for k in changes])
    for number, stage in enumerate([0, *changes]):
        rotary = schedule.rotary[stage]
        for kind in ("f64.plain", "f64.paired", "f32.plain", "f32.paired"):
            vectors.check(f"yarn_{kind}.freq.{number}", every_frequency(rotary))
            vectors.check(f"yarn_{kind}.scale.{number}", rotary.attn_scale)
    keys = "yarn_f32.plain.factor1_bf16", "yarn_f32.plain.factor2_bf16"
    rows = len(vectors[keys[0]])
    model = tg.GPT(cfg, tg.attention_reference, rows, {})
    model.set_rotary(schedule.rotary[-1].frequencies)
    for key, table in zip(keys, rotary_factors(model)):
        words = vectors.arrays[key]
        words[words == 0x8000] = 0                                        # -0, which is 0
        vectors.check(key, bf16_words(table[:rows] + 0.0))

# ----------------------------------------------------------------------------------------------------------------------
# fp8 head
# ----------------------------------------------------------------------------------------------------------------------

def check_fp8(oracle: Oracle) -> None:
    """The emulated head: bytes first, since the errors of fp8 are as large as its mistakes."""
    vectors, meta = oracle.open("fp8"), oracle.meta["fp8"]
    x, w = (bf16(vectors[f"{name}16"]).double().requires_grad_() for name in ("x", "w"))
    for name, value, scale in (("x", x, tg.FP8_Y_SCALE), ("w", w, tg.FP8_W_SCALE)):
        vectors.check(f"{name}_e4m3", tg.e4m3(value.detach(), scale).view(torch.uint8))
    targets = torch.from_numpy(vectors["targets"])[None]
    logits_dtypes = dict(f64logits=torch.float64, bf16logits=torch.bfloat16, exact=torch.float64)
    for mode, mtp, grad_out in vectors.find(r"(\w+)\.(m\w+?)(?:\.(\w+))?\.(?:losses|grad_\w+)"):
        scale = vectors[meta["eighth_uses"] if grad_out == "eighth" else "grad_s.w8"] / meta["grad_scale"]
        weights = torch.from_numpy(vectors[f"mtp.{mtp}"])
        x.grad = w.grad = None
        with spying((tg, "softcap"), (tg, "fp8_product")) as calls:
            losses = tg.HeadLoss.apply(x, w, targets, weights, torch.tensor(float(scale), dtype=torch.float64),
                                       "plain" if mode == "exact" else "emulated", logits_dtypes[mode], tg.as_part(w))
            losses.backward(torch.from_numpy(vectors[f"grad_out.{grad_out or 'ones'}"]))
        prefix = ".".join(filter(None, (mode, mtp, grad_out)))
        vectors.check(f"{mode}.logits_raw_rows0_8", calls["softcap"][0].logits[:8])
        vectors.check(f"{prefix}.losses", losses)
        for product in calls["fp8_product"]:
            if product.a.dtype == torch.float8_e5m2 and grad_out != "mixed":              # rows are those of the logits
                vectors.check(f"{prefix}.grad_logits_e5m2", product.a.view(torch.uint8))
        vectors.check(f"{prefix}.grad_x", x.grad)
        if grad_out == "mixed":                                           # of which the gradient of x is a product
            factors = torch.from_numpy(vectors["grad_out.mixed"])[:, None]
            vectors.check(f"{mode}.{mtp}.ones.grad_x", x.grad / factors)
        vectors.check(f"{prefix}.grad_w32", w.grad)
    for name, scale in (("x_s", tg.FP8_Y_SCALE), ("w_s", tg.FP8_W_SCALE), ("grad_s.w8", tg.FP8_GRAD_SCALE)):
        vectors.arrays[name] = vectors.arrays[name].astype(np.float32).astype(np.float64)     # as the products take it
        vectors.check(name, scale)
    vectors.finish()


CHECKS = dict(s_inputs=check_s_inputs, s_acts=check_s_acts, s_grads=check_s_grads, traj=check_traj, opt=check_opt,
              loader=check_loader, schedule=check_schedule, bigram=check_bigram, fp8=check_fp8)

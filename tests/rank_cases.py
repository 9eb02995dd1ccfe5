"""What the ranks do for test_ranks.py: one process per rank goes through all cases and leaves what it found in files.

    python tests/rank_cases.py FOLDER [--all]

This process imports torch once and forks the ranks of one world after another, so that a rank costs no start-up. Each
case has a process group of its own, made by the trainer: a case that fails on one rank, while the others wait for it,
leaves the next case alone. A case returns a dictionary; arrays go to <case>.<rank>.npz, the rest to <case>.<rank>.json,
a stack trace to <case>.<rank>.error. Nothing is judged here.
"""
from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import hashlib
import importlib
import inspect
import io
import json
import math
import multiprocessing
import os
import shutil
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import Tensor

import train_gpt as tg
from common import exact_array, few_layers, grad_of, plan_of, set_grad
from oracle import EXTRACT, WHOLE, Oracle, Trajectory

WORLDS = (8, 4, 2, 1)
SLOW_WORLD = 4                           # with --all: lies between two others
ODD_WORLD = 3                            # with --all: a number of ranks that divides next to nothing
COMM_TIMEOUT = 10                        # s
LATE_IMPORTS = ("torch.fx.experimental.symbolic_shapes", "triton")            # by a first step and a log's header
WORLD_DEADLINE = 300                     # s for all cases of a world; then a rank says where it is

Found = dict[str, Any]


@dataclass
class Rank:
    """One process of a world, in one case."""
    rank: int
    world: int
    folder: Path
    case: str = ""

    def fabric(self, cfg: tg.Config | None = None) -> tg.Fabric:
        """As the trainer makes it, but that ranks meet in a file."""
        meeting = dict(init_method=f"file://{self.folder}/{self.case}.store", rank=self.rank, world_size=self.world)
        with MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", functools.partial(dist.init_process_group, **meeting))
            return tg.make_fabric(cfg or tg.Config(device="cpu", num_slots=self.world, comm_timeout=COMM_TIMEOUT))

    def meet(self, store: dist.FileStore) -> None:
        """Wait until every rank has come as far as this case."""
        if store.add(self.case, 1) == self.world:
            store.set(f"{self.case}, all", "here")
        store.wait([f"{self.case}, all"], timedelta(seconds=4 * COMM_TIMEOUT))

# ----------------------------------------------------------------------------------------------------------------------
# Whole runs
# ----------------------------------------------------------------------------------------------------------------------

def kept_rows(executor: tg.Executor) -> dict[str, Tensor]:
    """Rows of tables that this rank owns, and of rowwise tables their state."""
    found = {}
    for label, table in executor.tables.items():
        if table.table.is_rowwise:
            table.home.settle()
            found |= {label: table.home.stored.rows, f"{label}.v": table.home.stored.v,
                      f"{label}.last": table.home.stored.last}
        else:
            found[label] = table.shard
    return found


def state_bytes(executor: tg.Executor) -> dict[str, bytes]:
    """Every byte that a run may change, found by walking through the objects and not by the list they keep."""
    optimizer, model = executor.optimizer, executor.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors |= {f"{label}.{name}": x for label, state in optimizer.state.items() for name, x in state.items()}
    tensors |= kept_rows(executor)
    tensors |= {f"{label}.row_grads": table.row_grads for label, table in executor.tables.items()}
    tensors |= {f"{label}.grad": table.grad for label, table in executor.tables.items() if table.home is None}
    found = {name: x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""
             for name, x in tensors.items()}
    rows = [(label, len(table.pending), table.cached is None) for label, table in executor.tables.items()]
    plain = dict(rotary=executor.rotary, rows=rows)
    return found | dict(rng=torch.get_rng_state().numpy().tobytes(), plain=repr(plain).encode())


def weight_hashes(executor: tg.Executor) -> dict[str, str]:
    """Of what this rank holds."""
    state = state_bytes(executor)
    return {label: hashlib.sha256(state[label]).hexdigest() for label in executor.optimizer.model.table}


def all_arrays(executor: tg.Executor, values: tg.Values) -> dict[str, np.ndarray]:
    """weight.LABEL, whole: of tables on rank 0 only; slice.LABEL and part.LABEL.NAME: a rank's rows and its state.

    Every rank calls it. values: of the next step. A tied embedding is the head and has no rows of its own.
    """
    weights = {f"weight.{label}": exact_array(x) for label, x in executor.whole_weights(values).items()
               if x is not None}
    slices = {f"slice.{label}": exact_array(x) for label, x in kept_rows(executor).items()
              if label != "embed" or not values.tied}
    return weights | slices | {f"part.{label}.{name}": exact_array(x)
                               for label, state in executor.optimizer.state.items() for name, x in state.items()}


def tiny(**changes: Any) -> tg.Config:
    cfg = tg.Config(**tg.PRESETS["tiny"] | dict(device="cpu", comm_timeout=COMM_TIMEOUT) | changes)
    tg.check_config(cfg)
    return cfg


def whole_run(rank: Rank, warm: bool, **changes: Any) -> Found:
    """tg.train on the tiny preset: losses of this rank's slots per token, validation losses, weights, state, output."""
    cfg = tiny(run_dir=f"{rank.folder}/{rank.case}", **changes)
    losses, validations, found = [], [], {}
    forward_backward, evaluate, warm_up, finish = (
        tg.Executor.forward_backward, tg.Executor.evaluate, tg.warm_up, tg.finish)

    def seen_forward_backward(self, batch, values, *rest):
        out = forward_backward(self, batch, values, *rest)
        losses.append(exact_array(out.slot_sums) / values.slot_tokens)
        return out

    def seen_evaluate(self, batches, values):
        validations.append((values.step, loss := evaluate(self, batches, values)))
        return loss

    def seen_warm_up(cfg, fabric, executor, log):
        found.update(initial=weight_hashes(executor), **{f"initial.{label}": exact_array(x)
                                                         for label, x in kept_rows(executor).items()})
        if not warm:
            return
        before = state_bytes(executor)
        warm_up(cfg, fabric, executor, log)
        after = state_bytes(executor)
        found.update(warm_up_steps=len(losses), left_by_warm_up=[name for name in after if after[name] != before[name]],
                     has_gradients=[label for label, p in executor.model.named_parameters() if p.grad is not None])
        losses.clear(), validations.clear()

    def seen_finish(log, preset, run_id, executor, *rest):
        arrays = all_arrays(executor, log.schedule.at(log.done))
        found.update({name: x for name, x in arrays.items() if rank.rank == 0 or not name.startswith("weight.")})
        found.update(final=weight_hashes(executor))
        return finish(log, preset, run_id, executor, *rest)

    with (MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed,
          contextlib.redirect_stderr(io.StringIO()) as errors):
        for owner, name, spy in ((tg.Executor, "forward_backward", seen_forward_backward),
                                 (tg.Executor, "evaluate", seen_evaluate), (tg, "warm_up", seen_warm_up),
                                 (tg, "finish", seen_finish)):
            patch.setattr(owner, name, spy)
        status = run(cfg, rank)
    assert status == 0, errors.getvalue()
    steps, values = zip(*validations)
    return found | dict(printed=printed.getvalue(), validation_steps=steps, slot_losses=np.stack(losses),
                        validation_losses=np.array(values))


def run(cfg: tg.Config, rank: Rank) -> int:
    """As main does it: the exit status of a run."""
    ending = SimpleNamespace(log=None, report_rows=lambda **facts: ending.log.event("comms", **facts))
    try:
        tg.train("tiny", cfg, rank.fabric(cfg), ending, Path(tg.__file__).read_bytes())
    except tg.TrainerError as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


def resumed(rank: Rank) -> Found:
    """A run in bf16 with checkpoints, in the folder "whole", and "two", which goes on from its last one."""
    whole, two = rank.folder / "whole", rank.folder / "two"
    first = ["--preset=tiny", "--device=cpu", "--seed=5", "--dtype=bfloat16", "--checkpoint_every=4",
             f"--comm_timeout={COMM_TIMEOUT}"]
    statuses = []
    for folder, flags in (whole, first), (two, [f"--resume={whole}"]):
        _, cfg = tg.parse_flags([*flags, f"--run_dir={folder}", f"--save={folder}_saved", "--sample_tokens=0"])
        with contextlib.redirect_stdout(io.StringIO()), MonkeyPatch.context() as patch:
            patch.setattr(tg, "warm_up", lambda *_: None)                     # it leaves no trace: run_12
            statuses.append(run(cfg, replace(rank, case=folder.name)))
        if dist.is_initialized():
            dist.destroy_process_group()
    return dict(statuses=statuses)


def run_12(rank: Rank, warm_worlds: Sequence[int] = (1, 2, 4)) -> Found:
    """On shards on disk, with warm-up in these worlds, saved weights and a sample."""
    data = rank.folder.parent
    return whole_run(rank, warm=rank.world in warm_worlds, dtype="float64", train_files=f"{data}/train_*.bin",
                     val_files=f"{data}/val_*.bin", save=f"{rank.folder}/saved")


def run_13(rank: Rank, **changes: Any) -> Found:
    return whole_run(rank, warm=False, dtype="float64", num_extension_steps=4, sample_tokens=0, **changes)


def run_every(rank: Rank) -> Found:
    """Adam at every step, and tables of n-grams at every one and at every second one."""
    tables = "every_embed 2 200 stream 1 device 1; second_embed 3 300 1 0 host 2"
    return whole_run(rank, warm=rank.world == 2, dtype="float64", num_extension_steps=4, sample_tokens=0, adam_every=1,
                     tables=tg.parse_value("tables", tables))


def run_single(rank: Rank, **changes: Any) -> Found:
    return whole_run(rank, warm=False, dtype="float32", sample_tokens=0, **changes)


def other_orders(rank: Rank) -> Found:
    """run_single with what travels, and what is updated, the other way round."""
    with MonkeyPatch.context() as patch:
        for name in ("REDUCE_ORDER", "UPDATE_ORDER"):
            patch.setattr(tg, name, getattr(tg, name)[::-1])
        return run_single(rank)


def unpack(vectors: Path, folder: Path) -> None:
    """What the trajectory needs, without the compression that each rank would have to undo."""
    folder.mkdir()
    shutil.copy(vectors / "meta.json", folder)
    for name in ("traj.npz", "traj_init.npz"):
        with np.load(vectors / name) as arrays:
            np.savez(folder / name, **arrays)


def trajectory(rank: Rank, name: str, row_comms: str = "sparse") -> Found:
    """The oracle's numbers; a mismatch is this case's error."""
    fabric, path = rank.fabric(), rank.folder.parent / name
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = Trajectory(Oracle(path, row_comms=row_comms), fabric)
        run.check()
    return dict(compared=len(run.vectors.compared), printed=printed.getvalue(), final=weight_hashes(run.executor))

# ----------------------------------------------------------------------------------------------------------------------
# Pieces of a step: what a call adds, and what it does not wait for
# ----------------------------------------------------------------------------------------------------------------------

COLLECTIVE_NAMES = ("all_", "reduce_scatter", "broadcast", "gather", "scatter", "send", "recv", "isend", "irecv",
                    "barrier", "batch_isend")
COLLECTIVES = ["reduce"] + [name for name, call in vars(dist).items()
                            if name.startswith(COLLECTIVE_NAMES) and inspect.isfunction(call)]



@contextlib.contextmanager
def collectives() -> Iterator[list[tuple[str, Tensor | None]]]:
    """Calls of torch.distributed by name, with a copy of the tensor that goes in."""
    calls, depth = [], []

    def spy(name: str, call: Callable) -> Callable:
        signature = inspect.signature(call)

        def counted(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            sent = next((given[key] for key in ("input", "input_tensor", "tensor") if key in given), None)
            if not depth:                                                     # some are made of others
                calls.append((name, sent.clone() if isinstance(sent, Tensor) else None))
            depth.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                depth.pop()
        return counted

    with MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, spy(name, getattr(dist, name)))
        yield calls


@torch.no_grad()
def fill_randomly(executor: tg.Executor, fabric: tg.Fabric) -> None:
    """No term of the forward pass is at zero, as it is at the start."""
    generator = torch.Generator().manual_seed(1)
    for row in executor.model.table.values():
        p, noise = executor.model.get_parameter(row.label), torch.randn(row.shape, generator=generator).double()
        mine = noise[fabric.rank::fabric.world] if row.label in executor.tables else noise
        p[:len(mine)] += 0.2 * mine
    if fabric.world == 1:                                                     # else it is read from the head
        executor.model.embed.copy_(executor.model.lm_head.t())


def tiny_run(fabric: tg.Fabric, steps: Sequence[int]) -> tuple[tg.Executor, list[tuple[tg.Values, tg.Batch]]]:
    """An executor with random weights in float64, and this rank's batches, the rows of the first of which are there."""
    plain = tiny(dtype="float64")
    headers = tg.find_shards(plain.train_files)
    cfg = tg.resolve(plain, headers, headers)
    executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    fill_randomly(executor, fabric)
    plan = [tg.Schedule(cfg).at(step) for step in steps]
    loader = tg.Loader(cfg, fabric, headers, [plan], executor.exchange_ahead)
    loader.start()
    batches = [(values, loader.next(values)) for values in plan]
    loader.close()
    for label, table in executor.tables.items():
        table.fetch(batches[0][1].plans[label], executor.model.lm_head)
    return executor, batches


def pieces(rank: Rank) -> Found:
    """A cycle with one call a step; with the slots cut, on odd ranks, into calls; with calls of weight 0 in between."""
    found, fabric, odd = dict(calls=[]), rank.fabric(), rank.rank % 2 == 1
    for way in ("whole", "cut", "extra"):
        executor, batches = tiny_run(fabric, (0, 1))
        for values, batch in batches:
            one_by_one = [batch.map(lambda x: x[slot:slot + 1]) for slot in reversed(range(len(batch.tokens)))]
            with collectives() as calls:
                for part in one_by_one if way == "cut" and odd else [batch]:
                    executor.forward_backward(part, values)
                    if way == "extra" and odd:
                        executor.forward_backward(one_by_one[0], values, 0.0)
            found["calls"] += [name for name, _ in calls]
            executor.optim_step(values)
        after = tg.Schedule(executor.cfg).at(2)
        found |= {f"{way}.{name}": x for name, x in all_arrays(executor, after).items()}
    return found


NO_WEIGHT = {                            # name -> has a rank nothing to add in a step?
    "last rank": lambda rank, step: rank.rank == rank.world - 1,
    "in turn": lambda rank, step: (rank.rank + step) % 2 == 0,
}


def weight_of_zero(rank: Rank) -> Found:
    """A cycle in which calls have weight 0, and the same by hand: with weight 1, and what it added taken out again."""
    found, fabric = {}, rank.fabric()
    for mix, idle in NO_WEIGHT.items():
        for way in ("weight", "hand"):
            executor, batches = tiny_run(fabric, (0, 1))
            optimizer = executor.optimizer
            dense = [label for label in optimizer.model.table if label not in executor.tables]
            row_grads = {label: table.row_grads for label, table in executor.tables.items()}
            for values, batch in batches:
                nothing = idle(rank, values.step)
                before = {label: torch.zeros_like(executor.model.get_parameter(label)) if grad is None else grad.clone()
                          for label in dense for grad in [grad_of(optimizer, label)]}
                rows_before = {label: x.clone() for label, x in row_grads.items()}
                executor.forward_backward(batch, values, 0.0 if nothing and way == "weight" else 1.0)
                if nothing and way == "hand":
                    for label in dense:
                        set_grad(optimizer, label, before[label])
                    for label, x in row_grads.items():
                        x.copy_(rows_before[label])
                executor.optim_step(values)
            arrays = all_arrays(executor, tg.Schedule(executor.cfg).at(2))
            found |= {f"{mix}/{way}/{name}": x for name, x in arrays.items()}
    return found


def nothing_to_add(rank: Rank) -> Found:
    """A step without any forward_backward."""
    executor, ((values, _),) = tiny_run(rank.fabric(), (1,))
    began = time.perf_counter()
    try:
        executor.optim_step(values)
    except tg.RunError as error:
        return dict(error=str(error), seconds=time.perf_counter() - began)
    return dict(error="", seconds=time.perf_counter() - began)

# ----------------------------------------------------------------------------------------------------------------------
# The optimizer with gradients by hand, on a model of which hardly anything can be dealt evenly
# ----------------------------------------------------------------------------------------------------------------------

UNEVEN_SLOTS, UNEVEN_STEPS, UNTIE_STEP, CYCLE = 24, 6, 3, 2
UNEVEN_ROWS = dict(bigram_embed=7, value_embed=1026, embed=513)               # fewer than ranks, and not a multiple


def uneven_config(dtype: str, **changes: Any) -> tg.Config:
    stages = tuple(stage._replace(batch_tokens=256 * UNEVEN_SLOTS) for stage in tg.STAGES)     # room for all rows
    return tg.Config(**tg.PRESETS["tiny"] | dict(
        num_slots=UNEVEN_SLOTS, stages=stages, val_batch_tokens=16 * UNEVEN_SLOTS, val_tokens=16 * UNEVEN_SLOTS,
        dtype=dtype, num_heads=2, head_dim=8, model_dim=16, vocab_size=512, document_start=511, padded_vocab=513,
        bigram_rows=UNEVEN_ROWS["bigram_embed"], num_scheduled_steps=3, num_extension_steps=UNEVEN_STEPS - 3,
        device="cpu") | changes)


def uneven_executor(fabric: tg.Fabric, dtype: str, **changes: Any) -> tg.Executor:
    with few_layers():
        executor = tg.Executor(uneven_config(dtype, **changes), fabric, tg.attention_reference, "plain")
        assert {label: table.table.rows for label, table in executor.tables.items()} == UNEVEN_ROWS
        return executor


def integers(step: int, label: str, shape: Sequence[int]) -> Tensor:
    """A gradient of each slot, small integers: sums over slots and a cycle are below 256, exact in every dtype.

    A slot reads some of the rows of a table, and only they have a gradient.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step}/{label}".encode()))
    drawn = torch.randint(-2, 3, (UNEVEN_SLOTS, *shape), generator=generator)
    return drawn * rows_read(step, label)[..., None] if label in UNEVEN_ROWS else drawn


def rows_read(step: int, label: str) -> Tensor:
    """(slots, rows): what each slot reads of a table."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step}/{label}/rows".encode()))
    return torch.rand(UNEVEN_SLOTS, UNEVEN_ROWS[label], generator=generator) < 0.15


def plan_rows(executor: tg.Executor, first: tg.Values, read: dict[str, np.ndarray]) -> dict[str, tuple]:
    """Plans of a cycle in which this rank reads these rows of each table: (plan, rows, where they stand)."""
    found = {}
    for label, rows in read.items():
        table, = [table for table in executor.planner.tables if table.label == label]
        plan, (places,) = plan_of(executor.planner, table, [rows.astype(np.int32)[None]], table.tied and first.tied,
                                  purpose="train", cycle=first.step // CYCLE, tokens=1)
        found[label] = plan, torch.from_numpy(rows), torch.from_numpy(places[0]).long()
    executor.exchange({label: plan for label, (plan, *_) in found.items()})
    return found


def by_hand(fabric: tg.Fabric, dtype: str, after_step: Callable[[int, tg.Executor], None] = lambda *_: None,
            prepare: Callable[[tg.Executor], None] = lambda _: None, **changes: Any) -> tg.Executor:
    """Six steps with the untying; each rank adds the gradients of its slots. The next cycle's rows come ahead of it."""
    executor, mine = uneven_executor(fabric, dtype, **changes), slice(fabric.rank, None, fabric.world)
    prepare(executor)
    schedule, plans = tg.Schedule(executor.cfg), {}
    assert schedule.untie_step == UNTIE_STEP, schedule.untie_step

    def planned(step: int) -> dict[str, tuple]:
        cycle = range(step, min(step + CYCLE, UNEVEN_STEPS))
        return plan_rows(executor, schedule.at(step), {label: np.flatnonzero(sum(
            rows_read(k, label)[mine].sum(dim=0) for k in cycle).numpy()) for label in UNEVEN_ROWS})

    plans[0] = planned(0)
    for step in range(UNEVEN_STEPS):
        for row in executor.model.table.values():
            p, grad = executor.model.get_parameter(row.label), integers(step, row.label, row.shape)[mine].sum(dim=0)
            if row.label in executor.tables:
                plan, rows, places = plans[step // CYCLE][row.label]
                _, row_grads = executor.tables[row.label].rows_for_forward(plan, executor.model.lm_head)
                row_grads.index_add_(0, places, grad[rows].to(row_grads.dtype))
            else:
                so_far = grad_of(executor.optimizer, row.label)
                set_grad(executor.optimizer, row.label, grad.to(p.dtype) + (0 if so_far is None else so_far))
        ahead = None
        if step % CYCLE and step + 1 < UNEVEN_STEPS:
            plans[(step + 1) // CYCLE] = planned(step + 1)
            ahead = {label: plan for label, (plan, *_) in plans[(step + 1) // CYCLE].items()}
        executor.optim_step(schedule.at(step), lambda: ahead)
        after_step(step, executor)
    return executor


def units_of(entry: tg.Sharded) -> Tensor:
    return tg.bank_matrices(entry.row, entry.weight.data)


def hand(rank: Rank, dtype: str, **changes: Any) -> Found:
    """Everything after the run, embed's and lm_head's state right after the untying, and the numbers of units."""
    found = {}

    def keep_untied(step: int, executor: tg.Executor) -> None:
        if step == UNTIE_STEP:
            both = ("part.embed", "part.lm", "weight.embed")
            arrays = all_arrays(executor, tg.Schedule(executor.cfg).at(step + 1))
            found.update({f"untied.{name}": x for name, x in arrays.items() if name.startswith(both)})

    executor = by_hand(rank.fabric(), dtype, keep_untied, **changes)
    entries = {label: entry for label, entry in executor.optimizer.entries.items() if label != tg.SMALL}
    owned = {label: len((entry if isinstance(entry, tg.Sharded) else entry.table).shard)
             for label, entry in entries.items()}
    units = {label: len(units_of(entry)) for label, entry in entries.items() if isinstance(entry, tg.Sharded)}
    end = tg.Schedule(executor.cfg).at(UNEVEN_STEPS)
    return found | all_arrays(executor, end) | dict(units=units, owned=owned)


def padding(rank: Rank) -> Found:
    """What is added for the communication is not a number: it must come nowhere. spoilt: how much of it there was."""
    def pad_with_nan(x: Tensor, pad: tuple) -> Tensor:
        return pad_zeros(x, pad, value=math.nan)

    spoilt, pad_zeros = [], torch.nn.functional.pad

    def spoil(executor: tg.Executor) -> None:
        for entry in executor.optimizer.entries.values():
            if isinstance(entry, tg.Sharded):
                for room in (entry.padded, entry.main_grad, entry.comm_buffer):
                    after = room[len(units_of(entry)):]
                    spoilt.append(len(after.fill_(math.nan)))

    with MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "pad", pad_with_nan)              # of tables, and of moments at the untying
        executor = by_hand(rank.fabric(), "float64", prepare=spoil)
        return all_arrays(executor, tg.Schedule(executor.cfg).at(UNEVEN_STEPS)) | dict(spoilt=sum(spoilt))


def orders(rank: Rank, count: int) -> Found:
    """Hash of all bits under other orders of communication; the first is the trainer's own, the second its reverse."""
    fabric, rng, found = rank.fabric(), np.random.default_rng(0), {}
    for number in range(count):
        with MonkeyPatch.context() as patch:
            for name in ("REDUCE_ORDER", "UPDATE_ORDER"):
                order = getattr(tg, name)
                order = (order, order[::-1])[number] if number < 2 else tuple(rng.permutation(order).tolist())
                patch.setattr(tg, name, order)
            state = state_bytes(by_hand(fabric, "float32"))
            found[f"{number}"] = {name: hashlib.sha256(x).hexdigest() for name, x in state.items()}
    return found


def counting(rank: Rank, **changes: Any) -> Found:
    """What travels in each optim_step. The gradient of the k-th label is filled with 2^k, which names it on the way."""
    executor = uneven_executor(rank.fabric(), "float64", **changes)
    optimizer, schedule, tables = executor.optimizer, tg.Schedule(executor.cfg), executor.tables
    code = {label: 2.0**k for k, label in enumerate(optimizer.model.table)}
    weights = dict(executor.model.named_parameters())
    label_at = {p.data.untyped_storage().data_ptr(): label for label, p in weights.items()}
    updates, found, plans = [], dict(reduced=[], sent=[], after=[], updated=[], kept=[], cleared=[]), {}

    def spy(update: Callable) -> Callable:
        def seen(p: Tensor, *rest) -> None:
            updates.append(label_at[p.untyped_storage().data_ptr()])
            update(p, *rest)
        return seen

    optimizer.normuon_update, optimizer.adam_update = map(spy, (optimizer.normuon_update, optimizer.adam_update))
    for step in range(UNEVEN_STEPS):
        before = {}
        if step % CYCLE == 0:
            every = {label: np.arange(rows) for label, rows in UNEVEN_ROWS.items()}
            plans = plan_rows(executor, schedule.at(step), every)
        for label, p in weights.items():
            if label in tables:
                plan, _, places = plans[label]
                tables[label].rows_for_forward(plan, executor.model.lm_head)[1][places] = code[label]
                before[label] = tables[label].row_grads.clone()
            else:
                set_grad(optimizer, label, torch.full_like(p, code[label]))
                before[label] = grad_of(optimizer, label)
        with collectives() as calls:
            executor.optim_step(schedule.at(step))
        names = [name for name, _ in calls]
        gathers = names.index("all_gather_into_tensor")                       # all sums have set off by then
        sums = [sent.unique().long().tolist() for _, sent in calls[:gathers]]
        found["reduced"].append([[label for label in code if any(total & int(code[label]) for total in totals)]
                                 for totals in sums])
        found["sent"].append([[name, list(sent.shape) if sent is not None else None] for name, sent in calls])
        found["after"].append(names[gathers:])
        found["updated"].append(list(updates))
        found["kept"].append([])
        found["cleared"].append([label for label, p in weights.items() if (
            not (tables[label].pending or tables[label].row_grads.any()) if label in tables
            else grad_of(optimizer, label) is None)])
        for label, p in weights.items():
            if label in tables:
                table = tables[label]
                kept = table.pending == [plans[label][0]] and table.row_grads.equal(before[label])
            else:
                grad = grad_of(optimizer, label)
                kept = grad is before[label] and bool((grad == code[label]).all())
            if kept:
                found["kept"][-1].append(label)
        updates.clear()
    return found

# ----------------------------------------------------------------------------------------------------------------------
# Agreement
# ----------------------------------------------------------------------------------------------------------------------

def random_plans(executor: tg.Executor, rank: Rank, **tag: Any) -> dict[str, tg.TablePlan]:
    """Of a cycle in which each rank reads rows of its own."""
    rng, plans = np.random.default_rng(rank.rank), {}
    for table in executor.planner.tables:
        rows = rng.choice(table.rows, table.rows // 2, replace=False).astype(np.int32)[None]
        told = dict(purpose="train", cycle=4, tokens=64) | tag
        plans[table.label], _ = plan_of(executor.planner, table, [rows], **told)
    return plans


def message(kind: type, call: Callable[[], object]) -> str | None:
    try:
        call()
    except kind as error:
        return str(error)
    return None


def plan_agreement(rank: Rank) -> Found:
    """Messages when the last rank, or the first, is at another cycle, or has other tokens or another dtype."""
    fabric = rank.fabric()
    executor = uneven_executor(fabric, "float64")
    last, first, before = rank.rank == rank.world - 1, rank.rank == 0, state_bytes(executor)
    tries = dict(same={}, cycle=dict(cycle=4 + last), first=dict(cycle=4 - first), tokens=dict(tokens=64 + last),
                 purpose=dict(purpose="warm-up" if last else "train"), dtype={}, again={})
    errors = {}
    for name, tag in tries.items():
        dtype = "float32" if name == "dtype" and last else "float64"
        plans = random_plans(executor, rank, **tag)
        errors[name] = message(tg.RunError, lambda: tg.exchange_plans(fabric, None, dtype, plans))
    return dict(errors=errors, changed=[name for name, x in state_bytes(executor).items() if x != before[name]])


def bad_rows(rank: Rank) -> Found:
    """Messages when the first rank requests places of the last one that no list may hold: of the last table, so that
    the others have nothing more to wait for."""
    def spoil(plan: tg.TablePlan, name: str) -> None:
        requested = plan.my_rows[-plan.send_counts[-1]:]
        if name == "out of range":
            requested[-1] = rank.world * plan.shard_size
        elif name == "unsorted":
            requested[:2] = requested[[1, 0]]
        elif name == "duplicate":
            requested[1] = requested[0]

    fabric, errors = rank.fabric(), {}
    executor = uneven_executor(fabric, "float64")
    for name in ("good", "out of range", "unsorted", "duplicate", "again"):
        plans = random_plans(executor, rank)
        if rank.rank == 0:
            spoil(plans["embed"], name)
        errors[name] = message(tg.RunError, lambda: tg.exchange_plans(fabric, None, "float64", plans))
    return dict(errors=errors)



def agreement(rank: Rank) -> Found:
    """Messages of check_agreement when the last rank, or the first, has another fact; and the lowest of a number."""
    fabric, same = rank.fabric(), {"--seed": "1", "data_sha256": "d1", "torch": "2"}
    last, first = rank.rank == rank.world - 1, rank.rank == 0
    tries = dict(same=same, last=same | ({"data_sha256": "d2"} if last else {}),
                 first=same | ({"--seed": "7"} if first else {}),
                 missing={name: fact for name, fact in same.items() if name != "torch" or not last})
    errors = {}
    for name, facts in tries.items():
        try:
            fabric.check_agreement(facts)
            errors[name] = None
        except tg.ConfigError as error:
            errors[name] = str(error)
    values = [5 - rank.rank, 5 + rank.rank, -rank.rank, 2**40 + rank.rank]
    return dict(errors=errors, lowest=[min(fabric.gather(value)) for value in values])


def other_flags(rank: Rank) -> Found:
    """A whole run in which the last rank has another flag: exit status, and what goes to stderr."""
    cfg = tiny(run_dir=f"{rank.folder}/{rank.case}", adam_lr=0.009 if rank.rank == rank.world - 1 else 0.008)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        status = run(cfg, rank)
    return dict(status=status, errors=errors.getvalue())


CASES = {                                # name -> numbers of ranks, what to do
    "agreement": (WORLDS, agreement),
    "other_flags": ((2, 4, 8), other_flags),
    "plan_agreement": ((2, 4), plan_agreement),
    "bad_rows": ((2, 4), bad_rows),
    "run_12": (WORLDS, run_12),
    "run_13": ((4, 2, 1), run_13),
    "run_single": ((4, 2, 1), run_single),
    "run_every": ((2, 1), run_every),
    "dense_13": ((4, 2, 1), functools.partial(run_13, row_comms="dense")),
    "dense_single": ((4,), functools.partial(run_single, row_comms="dense")),
    "debug_13": ((2, 4), functools.partial(run_13, debug_rows=1)),
    "again_single": ((2,), run_single),
    "resumed": ((2,), resumed),
    "pieces": ((4, 2, 1), pieces),
    "weight_of_zero": ((2,), weight_of_zero),
    "nothing_to_add": ((2,), nothing_to_add),
    "hand_float64": (WORLDS, functools.partial(hand, dtype="float64")),
    "hand_bfloat16": (WORLDS, functools.partial(hand, dtype="bfloat16")),
    "hand_dense": ((2, 4), functools.partial(hand, dtype="float64", row_comms="dense")),
    "padding": ((2, 4, 8), padding),
    "orders": ((2,), functools.partial(orders, count=5)),
    "counting": ((2, 4, 8), counting),
    "counting_dense": ((2,), functools.partial(counting, row_comms="dense")),
}
SLOW_CASES = {                           # with --all
    "run_12": ((8,), functools.partial(run_12, warm_worlds=(8,))),
    "hand_float64": ((ODD_WORLD,), functools.partial(hand, dtype="float64")),
    "hand_float32": ((1, 2, ODD_WORLD, 4, 8), functools.partial(hand, dtype="float32")),
    "hand_bfloat16": ((ODD_WORLD,), functools.partial(hand, dtype="bfloat16")),
    "padding": ((ODD_WORLD,), padding),
    "counting": ((ODD_WORLD,), counting),
    "run_every": ((4, 8), run_every),
    "dense_13": ((8,), functools.partial(run_13, row_comms="dense")),
    "dense_single": ((2, 8), functools.partial(run_single, row_comms="dense")),
    "orders_single": ((2,), other_orders),
    "debug_13": ((1,), functools.partial(run_13, debug_rows=1)),
    "run_13": ((8,), run_13),
    "run_single": ((8,), run_single),
    "pieces": ((8,), pieces),
    "hand_dense": ((8,), functools.partial(hand, dtype="float64", row_comms="dense")),
    "trajectory": ((2, 4, 8), functools.partial(trajectory, name="extract")),
    "trajectory_dense": ((2,), functools.partial(trajectory, name="extract", row_comms="dense")),
    "many_orders": ((2, 3, 4, 8), functools.partial(orders, count=40)),
    "whole_trajectory": ((2, 4, 8), functools.partial(trajectory, name="whole")),
}

# ----------------------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------------------

def keep(place: Rank, found: Found) -> None:
    arrays = {name: x for name, x in found.items() if isinstance(x, np.ndarray)}
    np.savez(place.folder / f"{place.case}.{place.rank}.npz", **arrays)
    rest = {name: x for name, x in found.items() if name not in arrays}
    (place.folder / f"{place.case}.{place.rank}.json").write_text(json.dumps(rest))


def one_rank(rank: int, world: int, folder: Path, cases: dict[str, Callable[[Rank], Any]], deadline: float,
             keep: Callable[[Rank, Any], None] = keep) -> None:
    """All cases of a rank in turn, each when every rank has come to it."""
    stuck = open(folder / f"stuck.{rank}", "w")
    faulthandler.dump_traceback_later(deadline, exit=True, file=stuck)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="1")               # wanted, and not used: see Rank.fabric
    store = dist.FileStore(str(folder / "meeting"), world)
    for name, case in cases.items():
        place = Rank(rank, world, folder, name)
        place.meet(store)
        began = time.perf_counter()
        try:
            keep(place, case(place))
        except BaseException:
            (folder / f"{name}.{rank}.error").write_text(traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank == 0:
            print(f"W = {world}: {name} {time.perf_counter() - began:.2f} s", flush=True)


def run_world(world: int, folder: Path, slow: bool) -> Callable[[], list]:
    """Start the ranks. Returns a wait for their end."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    cases = {name: case for table in (CASES, SLOW_CASES if slow else {}) for name, (worlds, case) in table.items()
             if world in worlds}
    place = folder / f"w{world}"
    place.mkdir()
    ranks = [context.Process(target=one_rank, args=(rank, world, place, cases, WORLD_DEADLINE * (1 + 2 * slow)))
             for rank in range(world)]
    for process in ranks:
        process.start()
    return lambda: [process.join() for process in ranks]


def main(folder: Path, slow: bool) -> None:
    unpack(EXTRACT, folder / "extract")
    if slow and WHOLE.is_dir():
        unpack(WHOLE, folder / "whole")
    for name in LATE_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()                          # spares each rank's collector a look at it all, and copies of the pages
    groups = [(8,), (2, 1)]
    if slow:
        groups += [(SLOW_WORLD,), (ODD_WORLD,)]
    for together in groups:
        for wait in [run_world(world, folder, slow) for world in together]:
            wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--all" in sys.argv[2:])

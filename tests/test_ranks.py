"""1, 2, 4 and 8 ranks compute the same run; the bytes they exchange, who updates what, and that nothing else does.

The functions with an argument `rank` are what each of W ranks does; the tests after them look at what the ranks found.
Most is compared with one process, whose numbers are the other tests' business. A sum over ranks has another order than
over slots: float64 runs differ by rounding, 1e-14 of a loss as measured. Where all numbers are integers, all bits are
equal.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import math
import operator
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from common import (exact_array, few_layers, fill_randomly, grad_of, rows_of_ngrams, set_grad,
                    started_loader, steps_of, tensors_of)
from pytest import MonkeyPatch
from forked_ranks import COMM_TIMEOUT, Rank, Ranks
from reference import merge_shards
from table_harness import PAIRS, TRIPLES, StagedStore
from torch import Tensor

import train_gpt as tg

SLOW_3, SLOW_4 = (pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))
worlds = pytest.mark.parametrize("world", [2, SLOW_3, SLOW_4, 8], ids="W{}".format)

Arrays = dict[str, np.ndarray]

def assert_same_bits(got: Arrays, want: Arrays) -> None:
    assert got.keys() == want.keys()
    assert [key for key in want if got[key].dtype != want[key].dtype or not np.array_equal(got[key], want[key])] == []

def assert_close(got: Arrays, want: Arrays, limit: float) -> None:
    """Norm of the difference over the norm."""
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert got[key].shape == x.shape, key
        error = np.linalg.norm(got[key] - x) / max(float(np.linalg.norm(x)), 1e-30)
        assert error <= limit, f"{key}: {error:.1e}"


# ---- Whole runs ------------------------------------------------------------------------------------------------------
def state_hashes(engine: tg.Engine) -> dict[str, str]:
    tensors = tensors_of(engine)
    hashes = {name: hashlib.sha256(exact_array(x).tobytes()).hexdigest() for name, x in tensors.items()}
    tables = []
    for label, table in engine.tables.items():
        is_cached = getattr(table, "cached_plan", None) is not None
        exchanged = [table.byte_totals[name] for name in ("bytes_sent", "bytes_received", "bytes_dense")]
        tables.append((label, table.has_grads, is_cached, exchanged))
    return hashes | dict(plain=repr((engine.rotary, tables)))

def full_state(engine: tg.Engine, values: tg.StepConfig) -> Arrays:
    """Weights and optimizer state in logical shapes, on rank 0. Collective; values: of the next step."""
    whole = engine.full_state(values, with_moments=True)
    return {name: exact_array(x) for name, x in whole.items() if x is not None}

def tiny(**changes: Any) -> tg.Config:
    cfg = tg.Config(preset="tiny", **tg.PRESETS["tiny"] | dict(device="cpu", comm_timeout=COMM_TIMEOUT) | changes)
    tg.check_config(cfg)
    return cfg

RUNS = {                                 # each has a stage change and a validation in mid-cycle, and the untying
    "all layers": dict(),
    "cycles": dict(adam_every=2, train_files="formula:512:511:1500:12"),      # of several shards; half a last cycle
    "dense": dict(adam_every=2, train_files="formula:512:511:1500:12", row_comms="dense", debug_rows=1),
    "every step": dict(adam_every=1, tables=(replace(PAIRS, update_every=1), TRIPLES)),
    "layers": dict(tables=(replace(PAIRS, update_every=4), replace(TRIPLES, layer=2)), micro_batch_size=2),
    "unseen": dict(tables=(replace(PAIRS, update_every=4), replace(TRIPLES, layer=2)), micro_batch_size=2, val_every=0),
    "cadence 4": dict(tables=(replace(PAIRS, update_every=4, layer=0), replace(TRIPLES, update_every=4)),
                      row_comms="dense"),
}

def tiny_run(rank: Rank, name: str, home: str) -> dict[str, Any]:
    """tg.train on tiny: losses of this rank's slots and of validations, all state at the end, what a warm-up left."""
    fields = dict(run_dir=f"{rank.folder}/run", save=f"{rank.folder}/saved", dtype="float64", sample_tokens=0,
                  num_extension_steps=4) | RUNS[name]
    tables = [replace(table, location=home) for table in fields.get("tables", ())]
    cfg = tiny(**fields | dict(tables=tuple(tables)))
    losses, validations, lookups, found = [], [], [], {}
    forward_backward = tg.Engine.forward_backward
    evaluate = tg.Engine.evaluate
    warm_up = tg.warm_up
    finish = tg.finish_run

    def seen_forward_backward(self, batch, values, *rest):
        rows = {}
        for spec in tg.table_specs(self.cfg):
            if not spec.tied_to_head or not values.tied:
                rows[spec.label] = np.unique(spec.row_ids(batch.tokens.numpy()))
        lookups.append(rows)
        out = forward_backward(self, batch, values, *rest)
        losses.append(exact_array(out.seq_sums) / values.seq_len)
        return out

    def seen_evaluate(self, batches, values):
        validations.append(evaluate(self, batches, values))
        return validations[-1]

    def seen_warm_up(cfg, comm, engine, log):
        found["initial"] = state_hashes(engine)
        if rank.world == 2 and name in ("all layers", "layers"):
            warm_up(cfg, comm, engine, log)
            found["warm_up_steps"] = len(losses)
            after = state_hashes(engine)
            found["left"] = [name for name in after if after[name] != found["initial"][name]]
        losses.clear()
        lookups.clear()
        validations.clear()

    def seen_finish(log, info, engine, *rest):
        found["state"] = full_state(engine, log.schedule.at(log.steps_done))
        found["tables"] = {name: exact_array(x) for name, x in rows_of_ngrams(engine).items()}
        found["final"] = state_hashes(engine)
        found["specs"] = [spec._replace(row_ids=None, sign_ids=None) for spec in tg.table_specs(engine.cfg)]
        return finish(log, info, engine, *rest)

    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        patch = stack.enter_context(MonkeyPatch.context())
        if name != "all layers":
            stack.enter_context(few_layers())
        patch.setitem(tg.ROW_STORES, "host", StagedStore)
        patch.setattr(tg.Engine, "forward_backward", seen_forward_backward)
        patch.setattr(tg.Engine, "evaluate", seen_evaluate)
        patch.setattr(tg, "warm_up", seen_warm_up)
        patch.setattr(tg, "finish_run", seen_finish)
        tg.train(cfg, rank.comm(cfg), SimpleNamespace(log=None), Path(tg.__file__).read_bytes())
    found |= dict(printed=printed.getvalue(), lookups=lookups)
    return found | dict(slot_losses=np.stack(losses), validations=np.array(validations))

def runs_of(ranks: Ranks, world: int, name: str, home: str = "device") -> list[dict[str, Any]]:
    """Return what each rank of such a run found; it is made once."""
    return ranks(world, tiny_run, name=name, home=home)

runs = pytest.mark.parametrize("name, world", [
    ("all layers", 2), ("cycles", 8), ("dense", 2), ("every step", 2), ("layers", 2), ("cadence 4", 2),
    *(pytest.param(name, 4, marks=pytest.mark.slow) for name in RUNS)])

@runs
def test_train__losses_do_not_depend_on_the_number_of_ranks(ranks, name, world):
    alone, = runs_of(ranks, 1, name)
    by_rank = runs_of(ranks, world, name)
    slots = np.stack([found["slot_losses"] for found in by_rank], axis=2)     # slot s is rank s mod W's
    np.testing.assert_allclose(slots.reshape(alone["slot_losses"].shape), alone["slot_losses"], rtol=0, atol=1e-9)
    for found in by_rank:
        np.testing.assert_allclose(found["validations"], alone["validations"], rtol=0, atol=1e-9)
        assert found["validations"].tobytes() == by_rank[0]["validations"].tobytes(), "all ranks know the same number"

@runs
def test_train__weights_and_moments_do_not_depend_on_the_number_of_ranks(ranks, name, world):
    """Adam divides by the gradient's own size: where that is nearly 0, rounding decides, even the sign of an entry.
    Such entries are few, so norms are compared. As measured: 1e-12. All ranks have the same bits at the start, which no
    rank tells another, and at the end."""
    alone, = runs_of(ranks, 1, name)
    by_rank = runs_of(ranks, world, name)
    assert_close(by_rank[0]["state"], alone["state"], 1e-9)
    for key, x in alone["tables"].items():
        assert x.any()
        assert_close({key: merge_shards([found["tables"][key] for found in by_rank], len(x))}, {key: x}, 1e-8)
    for found in by_rank:
        for label in {row.label for row in tg.parameter_specs(tiny())} - {*tg.BUILTIN_TABLES}:
            assert found["initial"][label] == alone["initial"][label], label
            assert found["final"][label] == by_rank[0]["final"][label] != found["initial"][label], label

@pytest.mark.parametrize("world", [1, 2, SLOW_4], ids="W{}".format)
@pytest.mark.parametrize("name", ["layers", "cadence 4"])
def test_ROW_STORES__runs_from_either_have_the_same_bits(ranks, name, world):
    """The host store of these runs is late by chance, and spoils its buffers."""
    for device, host in zip(*(runs_of(ranks, world, name, home) for home in tg.ROW_STORES)):
        assert host["final"] == device["final"]
        assert host["validations"].tobytes() == device["validations"].tobytes()

def test_evaluate__in_mid_cycle_changes_no_bit(ranks):
    for seen, unseen in zip(runs_of(ranks, 2, "layers"), runs_of(ranks, 2, "unseen")):
        assert len(seen["validations"]) > len(unseen["validations"])
        assert seen["final"] == unseen["final"]

@pytest.mark.parametrize("name, home", [("all layers", "device"), ("layers", "device"), ("layers", "host")])
def test_warm_up__leaves_no_trace_on_any_rank(ranks, name, home):
    for found in runs_of(ranks, 2, name, home):
        assert found["warm_up_steps"] > 4 and found["left"] == []

ROW_BYTES = 8 * 32                       # of float64, in the width of tiny
STATE_BYTES = 8 + 4                      # of a row-wise table's row: its second moment and its last update

def bytes_of_training(spec: tg.TableSpec, fetch_all: bool, by_rank: list[dict[str, Any]]) -> Counter:
    """Count the bytes that the ranks of a run move for a table, from the rows that each of them looked up.

    In each cycle, every rank requests its rows from the other ranks once, and receives them. If the cycle is completed,
    it returns the gradients of these rows. Rows of a row-wise table on the host are copied to the device in each cycle,
    and back after its update.
    """
    world = len(by_rank)
    shard_bytes = spec.shard_rows(world) * ROW_BYTES
    steps = len(by_rank[0]["lookups"])
    moved = Counter()
    for first in range(0, steps, spec.update_every):
        if spec.label not in by_rank[0]["lookups"][first]:                    # tied: its rows are read from the head
            continue
        fetched = 0
        requested = []
        for rank, found in enumerate(by_rank):
            by_step = [step[spec.label] for step in found["lookups"][first:first + spec.update_every]]
            requested.append(np.unique(np.concatenate(by_step)))
            fetched += int((requested[-1] % world != rank).sum())
        if fetch_all and not spec.rowwise:
            fetched = world * (world - 1) * spec.shard_rows(world)
        messages = 1 + (first + spec.update_every <= steps)                   # rows, and their gradients
        for name in ("bytes_sent", "bytes_received"):
            moved[name] += fetched * (4 + messages * ROW_BYTES)
        moved["bytes_dense"] += messages * world * (world - 1) * shard_bytes
        if spec.location == "host":
            changed = len(np.unique(np.concatenate(requested)))               # each row has one owner
            moved["bytes_up"] += changed * (ROW_BYTES + STATE_BYTES)
            moved["bytes_down"] += (messages - 1) * changed * (ROW_BYTES + STATE_BYTES)
    return moved

COUNTED = [
    *(("cycles", "device", world) for world in (1, 2, 4, 8)), ("dense", "device", 2), ("every step", "device", 2),
    ("layers", "device", 1), ("layers", "device", 2), ("layers", "host", 1), ("layers", "host", 2),
    ("cadence 4", "device", 2), ("cadence 4", "host", 1),
    *(pytest.param(name, home, 4, marks=pytest.mark.slow)
      for name, home in (("dense", "device"), ("layers", "host"), ("cadence 4", "device"), ("cadence 4", "host")))]

@pytest.mark.parametrize("name, home, world", COUNTED)
def test_finish_run__comms_are_what_training_has_moved(ranks, name, home, world):
    """By table, summed over ranks: without warm-up and validations, with the rows of a last cycle that is cut short."""
    by_rank = runs_of(ranks, world, name, home)
    text = (ranks.folder_of(world, tiny_run, name=name, home=home) / "run/log.jsonl").read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    assert "comms" not in [entry["type"] for entry in entries]
    steps = by_rank[0]["lookups"]
    assert len(steps) == entries[-1]["steps"]
    assert "embed" not in steps[0] and "embed" in steps[-1]
    fetch_all = RUNS[name].get("row_comms") == "dense"
    expected = {spec.label: bytes_of_training(spec, fetch_all, by_rank) for spec in by_rank[0]["specs"]}
    found = {label: Counter(counts) for label, counts in entries[-1]["comms"].items()}
    assert found == expected
    assert (world == 1) == (not any(counts["bytes_sent"] for counts in expected.values()))
    assert (home == "host") == any(counts["bytes_down"] for counts in expected.values())

def test_Log__rank_0_keeps_that_of_all(ranks):
    """Tokens and validation losses of the whole run; and the weights that it saves are those of all ranks."""
    logs = []
    for w in (1, 8):
        text = (ranks.folder_of(w, tiny_run, name="cycles", home="device") / "run/log.jsonl").read_text()
        entries = map(json.loads, text.splitlines())
        logs.append([entry for entry in entries if entry["type"] != "phase"])
    one, many = logs
    assert [log[0]["world_size"] for log in logs] == [1, 8]
    assert [entry["type"] for entry in many] == [entry["type"] for entry in one]
    for got, want in zip(many, one):
        for field in want.keys() & {"step", "tokens", "val_loss"}:
            assert got[field] == pytest.approx(want[field], rel=0, abs=1e-9), (want["type"], field)
    first, *others = runs_of(ranks, 8, "cycles")
    assert first["printed"] and not any(found["printed"] for found in others)
    weights = torch.load(ranks.folder_of(8, tiny_run, name="cycles", home="device") / "saved/weights.pt")
    saved = {label: x.numpy() for label, x in weights.items()}
    assert_same_bits(saved, {label: first["state"][label] for label in saved})


# ---- Steps by hand ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def started(comm: tg.Communicator, cfg: tg.Config,
            count: int) -> Iterator[tuple[tg.Engine, tg.Loader, list[tg.StepConfig]]]:
    """An engine with weights that leave no term at zero, a started loader, and the first steps."""
    headers = tg.read_shard_headers(cfg.train_files)
    cfg = tg.resolve_sizes(cfg, headers, headers)
    engine = tg.Engine(cfg, comm, tg.attention_reference, "plain")
    fill_randomly(engine.model, comm=comm)
    if comm.world_size == 1:             # else it is read from the head
        engine.model.embed.data.copy_(engine.model.lm_head.t())
    with started_loader(cfg, comm, count) as (loader, values):
        yield engine, loader, values

def end_of_step(engine: tg.Engine, loader: tg.Loader, values: tg.StepConfig) -> None:
    """Make all calls of `train_step` but the forward and backward pass."""
    next_plans = loader.next_plans()
    engine.prefetch_rows(next_plans)
    engine.optim_step(values)
    engine.fetch_rows(next_plans)

def pieces(rank: Rank, way: str) -> Arrays:
    """A cycle with one call a step; or, on odd ranks, with the slots cut into calls, with calls of weight 0 in between,
    or with those alone, which on one rank is a cycle of every second slot."""
    odd = rank.rank % 2 == 1
    cfg = tiny(dtype="float64", adam_every=2)
    with few_layers(), started(rank.comm(), cfg, 2) as (engine, loader, plan):
        for values in steps_of(loader, plan):
            batch = loader.next(values)
            one_by_one = [batch.map(operator.itemgetter(slice(slot, slot + 1))) for slot in range(len(batch.tokens))]
            parts = [batch]
            if way == "cut" and odd:
                parts = one_by_one[::-1]
            if way == "idle" and rank.world == 1:
                parts = one_by_one[::2]
            for part in parts:
                engine.forward_backward(part, values, 0.0 if way == "idle" and odd else 1.0)
                if way == "extra" and odd:
                    engine.forward_backward(one_by_one[0], values, 0.0)
            end_of_step(engine, loader, values)
        return full_state(engine, tg.Schedule(cfg).at(2))

@pytest.mark.parametrize("world", [2, SLOW_4], ids="W{}".format)
def test_forward_backward__calls_add_up_and_wait_for_nobody(ranks, world):
    """Odd ranks cut their slots into calls, last slot first; even ones make one call. A rank that waited for another
    in a call would wait for ever. Where the calls of odd ranks weigh nothing, only the slots of the others count."""
    alone, half = (ranks(1, pieces, way=way)[0] for way in ("whole", "idle"))
    whole, cut, extra, idle = (ranks(world, pieces, way=way)[0] for way in ("whole", "cut", "extra", "idle"))
    assert_close(whole, alone, 1e-9)
    assert_close(cut, whole, 1e-9)
    assert_same_bits(extra, whole)
    assert_close(idle, half, 1e-9)

UNEVEN_SLOTS, UNEVEN_STEPS, CYCLE = 24, 6, 2

def integers(step: int, label: str, shape: Sequence[int]) -> Tensor:
    """A gradient of each slot: sums over slots and a cycle are exact in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step}/{label}".encode()))
    return torch.randint(-2, 3, (UNEVEN_SLOTS, *shape), generator=generator)

def grads_of(table: tg.LocalTable | tg.ExchangedTable) -> Tensor:
    """Return the buffer in which a table's gradients accumulate."""
    return table.grad if isinstance(table, tg.LocalTable) else table.row_grads

def hand(rank: Rank, dtype: str = "float64", spoil: bool = False, order: int = 0, **changes: Any) -> dict[str, Any]:
    """Six steps with the untying, of a model of which hardly anything can be dealt evenly. In place of real gradients
    come the integers of this rank's slots; those of tables are zeros (table_harness.py has more). spoil: with NaN
    in all that is added for the communication alone. order: of reductions and updates; 0: the trainer's, 1: its
    reverse, else one by chance. Returns the state right after the untying and at the end."""
    stages = tuple(replace(stage, batch_tokens=16 * UNEVEN_SLOTS) for stage in tg.TINY["stages"])
    cfg = tiny(seqs_per_step=UNEVEN_SLOTS, stages=stages, val_batch_tokens=16 * UNEVEN_SLOTS,
               val_tokens=16 * UNEVEN_SLOTS,
               dtype=dtype, num_heads=2, head_dim=8, model_dim=16, padded_vocab=513, bigram_rows=7, adam_every=CYCLE,
               num_scheduled_steps=3, num_extension_steps=UNEVEN_STEPS - 3, **changes)
    schedule = tg.Schedule(cfg)
    assert 0 < schedule.untie_step < UNEVEN_STEPS - 1
    rng = np.random.default_rng(order)
    padding = 0
    found = {}
    with few_layers(), MonkeyPatch.context() as patch:
        for name in ("REDUCE_ORDER", "UPDATE_ORDER"):
            labels = list(getattr(tg, name))
            orders = (labels, labels[::-1])
            patch.setattr(tg, name, orders[order] if order < 2 else rng.permutation(labels).tolist())
        if spoil:
            patch.setattr(torch.nn.functional, "pad", functools.partial(torch.nn.functional.pad, value=math.nan))
        with started(rank.comm(), cfg, UNEVEN_STEPS) as (engine, loader, plan):
            optimizer = engine.optimizer
            for group in optimizer.sharded_groups.values():
                count = len(tg.bank_matrices(group.spec, group.weight))
                for buffer in (group.padded, group.main_grad, group.comm_buffer):
                    padding += len(buffer[count:])
                    if spoil:
                        buffer[count:] = math.nan
            for values in steps_of(loader, plan):
                so_far = {label: grad_of(optimizer, label) for label in engine.model.specs}
                so_far = {label: grad.clone() for label, grad in so_far.items() if grad is not None}
                engine.forward_backward(loader.next(values), values)
                for row in engine.model.specs.values():
                    if row.label in engine.tables:
                        grads_of(engine.tables[row.label]).zero_()
                    else:
                        grad = integers(values.step, row.label, row.shape)[rank.rank::rank.world].sum(dim=0)
                        set_grad(optimizer, row.label, grad + so_far.get(row.label, 0))
                end_of_step(engine, loader, values)
                if values.untie_after:
                    found["untied"] = full_state(engine, schedule.at(values.step + 1))
            return found | dict(end=full_state(engine, schedule.at(UNEVEN_STEPS)), hashes=state_hashes(engine),
                                padding=padding)

@pytest.mark.parametrize("world, dtype, mode", [
    (2, "float64", "sparse"), (2, "float64", "dense"), (2, "bfloat16", "sparse"), (8, "bfloat16", "sparse"),
    *(pytest.param(world, dtype, mode, marks=pytest.mark.slow) for world in (3, 4, 8)
      for dtype, mode in (("float64", "sparse"), ("float32", "dense")))])
def test_step__sums_that_are_exact_give_the_same_bits_at_every_world(ranks, world, dtype, mode):
    """Tied and untied, with integers for gradients; 24 slots, of which 1/24 is no binary number."""
    alone, = ranks(1, hand, dtype=dtype)
    first, *_ = ranks(world, hand, dtype=dtype, row_comms=mode)
    for moment in ("untied", "end"):
        assert_same_bits(first[moment], alone[moment])
    for ending in ("", ".m", ".v"):                           # the head's are cut along D, the embedding's along V
        np.testing.assert_array_equal(first["untied"][f"embed{ending}"], first["untied"][f"lm_head{ending}"].T)
    assert all(x.any() for name, x in alone["end"].items() if name.split(".")[0] not in tg.BUILTIN_TABLES[:2])
    assert ("mlp.mantissa" in alone["end"]) == (dtype == "bfloat16")

@worlds
def test_ShardedGroup__padding_comes_nowhere(ranks, world):
    """Filled with NaN instead of zeros, it changes no bit."""
    by_rank = ranks(world, hand, spoil=True, dtype="bfloat16", row_comms="sparse")
    assert world == 2 or all(found["padding"] for found in by_rank), "2 divides the matrices"
    assert_same_bits(by_rank[0]["end"], ranks(world, hand, dtype="bfloat16", row_comms="sparse")[0]["end"])

@pytest.mark.parametrize("world, order", [
    (2, 1), (2, 2), *(pytest.param(world, order, marks=pytest.mark.slow)
                       for world in (3, 8) for order in range(1, 12))])
def test_orders__any_order_of_communication_gives_the_same_bits(ranks, world, order):
    for found, want in zip(ranks(world, hand, order=order), ranks(world, hand, order=0)):
        assert found["hashes"] == want["hashes"]


# ---- Agreement -------------------------------------------------------------------------------------------------------
def other_fact(rank: Rank, teller: int, changes: dict[str, str]) -> str:
    """Return what check_agreement says when one rank has other facts."""
    facts = {"--seed": "1", "data_sha256": "d1", "torch": "2"}
    if rank.rank == teller % rank.world:
        facts |= changes
    with pytest.raises(tg.ConfigError) as caught:
        rank.comm().check_agreement({name: fact for name, fact in facts.items() if fact})
    return str(caught.value)

@worlds
@pytest.mark.parametrize("teller, changes, name, values", [
    (-1, dict(data_sha256="d2"), "data_sha256", ("d1", "d2")), (0, {"--seed": "7"}, "--seed", ("7", "1")),
    (-1, dict(torch=""), "torch", ("2", "None"))], ids=["last", "first", "missing"])
def test_check_agreement__all_say_so(ranks, world, teller, changes, name, values):
    """The field, both values and ranks, and what to do."""
    first, other = values
    for error in ranks(world, other_fact, teller=teller, changes=changes):
        what, found, _, do = error.split("\n")
        assert what.endswith(f"disagree about {name}") and "same flags" in do
        assert f"{first} on rank 0, {other} on rank {world - 1 if teller else 1}" in found

"""1, 2, 4 and 8 ranks compute the same run; what travels between them, who updates what, and that nothing else does.

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
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import exact_array, few_layers, fill_randomly, grad_of, plan_of, set_grad
from pytest import MonkeyPatch
from ranks import COMM_TIMEOUT, Rank
from torch import Tensor

import train_gpt as tg

SLOW_3, SLOW_4 = (pytest.param(world, marks=pytest.mark.all) for world in (3, 4))
worlds = pytest.mark.parametrize("world", [2, SLOW_4, 8], ids="W{}".format)
odd_worlds = pytest.mark.parametrize("world", [2, SLOW_3, SLOW_4, 8], ids="W{}".format)

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

def state_hashes(executor: tg.Executor) -> dict[str, str]:
    """Of every byte that a run may change, found by walking through the objects and not by the list they keep."""
    tensors = dict(executor.model.named_parameters()) | dict(executor.model.named_buffers())
    for label, state in executor.optimizer.state.items():
        tensors |= {f"{label}.{name}": x for name, x in state.items()}
    for label, table in executor.tables.items():
        tensors[f"{label}.row_grads"] = table.row_grads
        if table.home is not None:
            table.home.settle()
            tensors |= {f"{label}.{name}": x for name, x in table.home.stored._asdict().items()}
    tensors["random"] = torch.get_rng_state()
    hashes = {name: hashlib.sha256(exact_array(x).tobytes()).hexdigest() for name, x in tensors.items()}
    pending = [(label, len(table.pending), table.cached is None) for label, table in executor.tables.items()]
    return hashes | dict(plain=repr((executor.rotary, pending)))


def whole_state(executor: tg.Executor, values: tg.Values) -> Arrays:
    """Weights and optimizer state in logical shapes, on rank 0. Collective; values: of the next step."""
    state = executor.whole_state(values)
    whole = state["weights"] | state["moments"]
    return {name: exact_array(x) for name, x in whole.items() if x is not None}


def tiny(**changes: Any) -> tg.Config:
    cfg = tg.Config(**tg.PRESETS["tiny"] | dict(device="cpu", comm_timeout=COMM_TIMEOUT) | changes)
    tg.check_config(cfg)
    return cfg


def whole_run(rank: Rank, warm: bool = False, **changes: Any) -> dict[str, Any]:
    """tg.train on tiny: losses of this rank's slots and of validations, all state at the end, what a warm-up left."""
    cfg = tiny(run_dir=f"{rank.folder}/run", dtype="float64", sample_tokens=0, **changes)
    losses, validations, found = [], [], {}
    forward_backward, evaluate, warm_up, finish = (
        tg.Executor.forward_backward, tg.Executor.evaluate, tg.warm_up, tg.finish)

    def seen_forward_backward(self, batch, values, *rest):
        out = forward_backward(self, batch, values, *rest)
        losses.append(exact_array(out.slot_sums) / values.slot_tokens)
        return out

    def seen_evaluate(self, batches, values):
        validations.append(evaluate(self, batches, values))
        return validations[-1]

    def seen_warm_up(cfg, fabric, executor, log):
        found["initial"] = state_hashes(executor)
        if warm:
            warm_up(cfg, fabric, executor, log)
            found["warm_up_steps"] = len(losses)
            after = state_hashes(executor)
            found["left"] = [name for name in after if after[name] != found["initial"][name]]
        losses.clear()
        validations.clear()

    def seen_finish(log, preset, run_id, executor, *rest):
        found["state"] = whole_state(executor, log.schedule.at(log.done))
        found["final"] = state_hashes(executor)
        return finish(log, preset, run_id, executor, *rest)

    ending = SimpleNamespace(log=None, report_rows=lambda **facts: ending.log.event("comms", **facts))
    with MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(tg.Executor, "forward_backward", seen_forward_backward)
        patch.setattr(tg.Executor, "evaluate", seen_evaluate)
        patch.setattr(tg, "warm_up", seen_warm_up)
        patch.setattr(tg, "finish", seen_finish)
        tg.train("tiny", cfg, rank.fabric(cfg), ending, Path(tg.__file__).read_bytes())
    return found | dict(printed=printed.getvalue(), slot_losses=np.stack(losses), validations=np.array(validations))


def in_cycles(rank: Rank) -> dict[str, Any]:
    """Several shards, a stage change and a validation in mid-cycle, the untying, half a last cycle; saved weights."""
    formula = "formula:512:511:1500:12"
    return whole_run(rank, warm=rank.world == 2, num_extension_steps=4, train_files=formula, adam_every=2,
                     save=f"{rank.folder}/saved")


def every_step(rank: Rank) -> dict[str, Any]:
    """Adam at every step, and tables of n-grams at every one and at every second one."""
    tables = "every_embed 2 200 stream 1 device 1; second_embed 3 300 1 0 host 2"
    return whole_run(rank, num_extension_steps=4, adam_every=1, tables=tg.parse_value("tables", tables))


runs = pytest.mark.parametrize("run, world", [
    (in_cycles, 2), (in_cycles, 8), (every_step, 2), pytest.param(in_cycles, 4, marks=pytest.mark.all),
    pytest.param(every_step, 4, marks=pytest.mark.all), pytest.param(every_step, 8, marks=pytest.mark.all)])


@runs
def test_train__losses_do_not_depend_on_the_number_of_ranks(ranks, run, world):
    """Every slot at every step, and every validation, on every rank."""
    alone, = ranks(1, run)
    by_rank = ranks(world, run)
    slots = np.stack([found["slot_losses"] for found in by_rank], axis=2)     # slot s is rank s mod W's
    np.testing.assert_allclose(slots.reshape(alone["slot_losses"].shape), alone["slot_losses"], rtol=0, atol=1e-9)
    for found in by_rank:
        np.testing.assert_allclose(found["validations"], alone["validations"], rtol=0, atol=1e-9)
        assert found["validations"].tobytes() == by_rank[0]["validations"].tobytes(), "all ranks know the same number"


@runs
def test_train__weights_and_moments_do_not_depend_on_the_number_of_ranks(ranks, run, world):
    """Adam divides by the gradient's own size: where that is nearly 0, rounding decides, even the sign of an entry.

    Such entries are few, so norms are compared. As measured: 1e-12.
    """
    alone, = ranks(1, run)
    by_rank = ranks(world, run)
    assert_close(by_rank[0]["state"], alone["state"], 1e-9)


@runs
def test_train__all_ranks_have_the_same_weights(ranks, run, world):
    """At the start, which no rank tells another, and at the end."""
    alone, = ranks(1, run)
    by_rank = ranks(world, run)
    for found in by_rank:
        for label in {row.label for row in tg.parameter_table(tiny())} - {*tg.RECIPE_TABLES}:
            assert found["initial"][label] == alone["initial"][label], label
            assert found["final"][label] == by_rank[0]["final"][label] != found["initial"][label], label


def test_warm_up__leaves_no_trace_on_any_rank(ranks):
    for found in ranks(2, in_cycles):
        assert found["warm_up_steps"] > 4 and found["left"] == []


@worlds
def test_Log__rank_0_keeps_that_of_all(ranks, world):
    """Tokens and validation losses of the whole run; where the ranks' own things stand is written down."""
    logs = []
    for w in (1, world):
        text = (ranks.folder_of(w, in_cycles) / "run/log.jsonl").read_text()
        entries = map(json.loads, text.splitlines())
        logs.append([entry for entry in entries if entry["type"] not in ("phase", "comms")])
    one, many = logs
    assert [log[0]["world_size"] for log in logs] == [1, world]
    assert [entry["type"] for entry in many] == [entry["type"] for entry in one]
    for got, want in zip(many, one):
        for field in want.keys() & {"step", "tokens", "val_loss"}:
            assert got[field] == pytest.approx(want[field], rel=0, abs=1e-9), (want["type"], field)
    assert [bool(found["printed"]) for found in ranks(world, in_cycles)] == [rank == 0 for rank in range(world)]


@worlds
def test_save__files_do_not_depend_on_the_number_of_ranks(ranks, world):
    """Bit for bit the run's weights, in logical shapes; all else is written as by one rank."""
    one, many = (ranks.folder_of(w, in_cycles) / "saved" for w in (1, world))
    assert sorted(path.name for path in many.iterdir()) == sorted(path.name for path in one.iterdir())
    tensors = torch.load(many / "weights.pt")
    state = ranks(world, in_cycles)[0]["state"]
    assert_same_bits({label: x.numpy() for label, x in tensors.items()}, {label: state[label] for label in tensors})
    _, cfg = tg.read_settings(many)
    assert {row.label: row.shape for row in tg.parameter_table(cfg)} == {
        label: tuple(x.shape) for label, x in tensors.items()}


# ---- Pieces of a step: what a call adds, and what it does not wait for -----------------------------------------------

def first_steps(fabric: tg.Fabric, *steps: int) -> tuple[tg.Executor, list[tuple[tg.Values, tg.Batch]]]:
    """An executor with random weights in float64, and this rank's batches."""
    headers = tg.find_shards(tiny().train_files)
    cfg = tg.resolve(tiny(dtype="float64", adam_every=2), headers, headers)
    executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    fill_randomly(executor.model, where=fabric)
    if fabric.world == 1:                                                     # else it is read from the head
        executor.model.embed.data.copy_(executor.model.lm_head.t())
    plan = [tg.Schedule(cfg).at(step) for step in steps]
    loader = tg.Loader(cfg, fabric, headers, [plan], executor.exchange_ahead)
    loader.start()
    batches = [(values, loader.next(values)) for values in plan]
    loader.close()
    for label, table in executor.tables.items():
        table.fetch(batches[0][1].plans[label], executor.model.lm_head)
    return executor, batches


def pieces(rank: Rank, way: str) -> Arrays:
    """A cycle: with one call a step; or, on odd ranks, with the slots cut into calls, with calls of weight 0 in between,
    or with those alone, which on one rank is a cycle of every second slot."""
    executor, batches = first_steps(rank.fabric(), 0, 1)
    odd = rank.rank % 2 == 1
    for values, batch in batches:
        one_by_one = [batch.map(operator.itemgetter(slice(slot, slot + 1))) for slot in range(len(batch.tokens))]
        parts = [batch]
        if way == "cut" and odd:
            parts = one_by_one[::-1]
        if way == "idle" and rank.world == 1:
            parts = one_by_one[::2]
        for part in parts:
            executor.forward_backward(part, values, 0.0 if way == "idle" and odd else 1.0)
            if way == "extra" and odd:
                executor.forward_backward(one_by_one[0], values, 0.0)
        executor.optim_step(values)
    return whole_state(executor, tg.Schedule(executor.cfg).at(2))


@pytest.mark.parametrize("world", [2, SLOW_4], ids="W{}".format)
def test_forward_backward__calls_add_up_and_wait_for_nobody(ranks, world):
    """Odd ranks cut their slots into calls, last slot first; even ones make one call. A rank that waited for another
    in a call would wait for ever."""
    alone, = ranks(1, pieces, way="whole")
    whole, cut, extra = (ranks(world, pieces, way=way)[0] for way in ("whole", "cut", "extra"))
    assert_close(whole, alone, 1e-9)
    assert_close(cut, whole, 1e-9)
    assert_same_bits(extra, whole)


def test_forward_backward__a_rank_whose_calls_weigh_nothing_joins_with_zeros(ranks):
    """It neither stops nor keeps the other waiting, and only the slots of the other count."""
    alone, = ranks(1, pieces, way="idle")
    assert_close(ranks(2, pieces, way="idle")[0], alone, 1e-9)


# ---- The optimizer with gradients by hand, on a model of which hardly anything can be dealt evenly -------------------

UNEVEN_SLOTS, UNEVEN_STEPS, CYCLE = 24, 6, 2
UNEVEN_ROWS = dict(bigram_embed=7, value_embed=1026, embed=513)               # fewer than ranks, and not a multiple


def uneven_executor(fabric: tg.Fabric, dtype: str, **changes: Any) -> tg.Executor:
    stages = tuple(stage._replace(batch_tokens=256 * UNEVEN_SLOTS) for stage in tg.TINY["stages"])   # room for all rows
    cfg = tg.Config(**tg.PRESETS["tiny"] | dict(
        num_slots=UNEVEN_SLOTS, stages=stages, val_batch_tokens=16 * UNEVEN_SLOTS, val_tokens=16 * UNEVEN_SLOTS,
        dtype=dtype, num_heads=2, head_dim=8, model_dim=16, vocab_size=512, document_start=511, padded_vocab=513,
        bigram_rows=UNEVEN_ROWS["bigram_embed"], num_scheduled_steps=3, num_extension_steps=UNEVEN_STEPS - 3,
        adam_every=CYCLE, device="cpu") | changes)
    with few_layers():
        executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    assert {label: table.table.rows for label, table in executor.tables.items()} == UNEVEN_ROWS
    return executor


def generator_of(*seed: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, seed)).encode()))


def rows_read(step: int, label: str) -> Tensor:
    """(slots, rows): what each slot reads of a table."""
    return torch.rand(UNEVEN_SLOTS, UNEVEN_ROWS[label], generator=generator_of(step, label, "rows")) < 0.15


def integers(step: int, label: str, shape: Sequence[int]) -> Tensor:
    """A gradient of each slot, small integers: sums over slots and a cycle are below 256, exact in every dtype.

    A slot reads some of the rows of a table, and only they have a gradient.
    """
    grad = torch.randint(-2, 3, (UNEVEN_SLOTS, *shape), generator=generator_of(step, label))
    return grad * rows_read(step, label)[..., None] if label in UNEVEN_ROWS else grad


def plan_rows(executor: tg.Executor, first: tg.Values, read: dict[str, np.ndarray]) -> dict[str, tuple]:
    """Plans of a cycle in which this rank reads these rows of each table: (plan, rows, where they stand)."""
    found = {}
    for table in executor.planner.tables:
        rows = read[table.label]
        plan, (places,) = plan_of(executor.planner, table, [rows.astype(np.int32)[None]], table.tied and first.tied,
                                  purpose="train", cycle=first.step // CYCLE, tokens=1)
        found[table.label] = plan, torch.from_numpy(rows), torch.from_numpy(places[0]).long()
    executor.exchange({label: plan for label, (plan, *_) in found.items()})
    return found


def hand(rank: Rank, dtype: str = "float64", spoil: bool = False, order: int = 0, **changes: Any) -> dict[str, Any]:
    """Six steps with the untying; each rank adds the gradients of its slots. The next cycle's rows come ahead of it.

    spoil: with NaN in all that is added for the communication alone. order: of reductions and updates; 0: the
    trainer's, 1: its reverse, else one by chance. Returns the state right after the untying and at the end.
    """
    pad_with_nan = functools.partial(torch.nn.functional.pad, value=math.nan)
    rng = np.random.default_rng(order)
    with MonkeyPatch.context() as patch:
        for name in ("REDUCE_ORDER", "UPDATE_ORDER"):
            labels = list(getattr(tg, name))
            orders = (labels, labels[::-1])
            patch.setattr(tg, name, orders[order] if order < 2 else rng.permutation(labels).tolist())
        if spoil:
            patch.setattr(torch.nn.functional, "pad", pad_with_nan)
        executor = uneven_executor(rank.fabric(), dtype, **changes)
        padding = 0
        for entry in executor.optimizer.sharded.values():
            count = len(tg.bank_matrices(entry.row, entry.weight))
            for room in (entry.padded, entry.main_grad, entry.comm_buffer):
                padding += len(room[count:])
                if spoil:
                    room[count:] = math.nan
        return six_steps(executor, slice(rank.rank, None, rank.world)) | dict(padding=padding)


def six_steps(executor: tg.Executor, my_slots: slice) -> dict[str, Arrays]:
    schedule = tg.Schedule(executor.cfg)
    assert 0 < schedule.untie_step < UNEVEN_STEPS - 1
    plans, found = {}, {}

    def planned(first: int) -> dict[str, tuple]:
        """Of the cycle that begins with this step; once."""
        if first not in plans:
            read = {}
            for label in UNEVEN_ROWS:
                of_steps = [rows_read(step, label)[my_slots].sum(dim=0) for step in range(first, first + CYCLE)]
                read[label] = np.flatnonzero(sum(of_steps).numpy())
            plans[first] = plan_rows(executor, schedule.at(first), read)
        return plans[first]

    for step in range(UNEVEN_STEPS):
        first = step - step % CYCLE
        for row in executor.model.table.values():
            grad = integers(step, row.label, row.shape)[my_slots].sum(dim=0)
            if row.label in executor.tables:
                plan, rows, places = planned(first)[row.label]
                _, row_grads = executor.tables[row.label].rows_for_forward(plan, executor.model.lm_head)
                row_grads.index_add_(0, places, grad[rows].to(row_grads.dtype))
            else:
                so_far = grad_of(executor.optimizer, row.label)
                set_grad(executor.optimizer, row.label, grad if so_far is None else so_far + grad)

        def plans_ahead() -> dict[str, tg.TablePlan] | None:
            ahead = first + CYCLE
            return {label: plan for label, (plan, *_) in planned(ahead).items()} if ahead < UNEVEN_STEPS else None
        executor.optim_step(schedule.at(step), plans_ahead)
        if step == schedule.untie_step:
            found["untied"] = whole_state(executor, schedule.at(step + 1))
    return found | dict(end=whole_state(executor, schedule.at(UNEVEN_STEPS)), hashes=state_hashes(executor))


@odd_worlds
@pytest.mark.parametrize("dtype, mode", [("float64", "sparse"), ("float64", "dense"), ("bfloat16", "sparse"),
                                         pytest.param("float32", "dense", marks=pytest.mark.all)])
def test_step__sums_that_are_exact_give_the_same_bits_at_every_world(ranks, dtype, mode, world):
    """Tied and untied, with integers for gradients; 24 slots, of which 1/24 is no binary number."""
    alone, = ranks(1, hand, dtype=dtype)
    first, *_ = ranks(world, hand, dtype=dtype, row_comms=mode)
    for moment in ("untied", "end"):
        assert_same_bits(first[moment], alone[moment])
    assert all(x.any() for x in alone["end"].values()), "everything has moved"
    assert ("mlp.mantissa" in alone["end"]) == (dtype == "bfloat16")


@odd_worlds
def test_untie__the_embedding_begins_with_the_heads_weights_and_moments(ranks, world):
    """The head's are cut along D, the embedding's along V."""
    untied = ranks(world, hand)[0]["untied"]
    for ending in ("", ".m", ".v"):
        assert untied[f"embed{ending}"].any()
        np.testing.assert_array_equal(untied[f"embed{ending}"], untied[f"lm_head{ending}"].T)


@odd_worlds
def test_Sharded__padding_comes_nowhere(ranks, world):
    """Filled with NaN instead of zeros, it changes no bit."""
    by_rank = ranks(world, hand, spoil=True)
    assert world == 2 or all(found["padding"] for found in by_rank), "2 divides the matrices"
    assert_same_bits(by_rank[0]["end"], ranks(world, hand)[0]["end"])


@pytest.mark.parametrize("world, order", [
    (2, 1), (2, 2), *(pytest.param(world, order, marks=pytest.mark.all) for world in (3, 8) for order in range(1, 12))])
def test_orders__any_order_of_communication_gives_the_same_bits(ranks, world, order):
    for found, want in zip(ranks(world, hand, order=order), ranks(world, hand, order=0)):
        assert found["hashes"] == want["hashes"]


# ---- Agreement -------------------------------------------------------------------------------------------------------

def other_fact(rank: Rank, teller: int, changes: dict[str, str]) -> str:
    """What check_agreement says when one rank has other facts."""
    facts = {"--seed": "1", "data_sha256": "d1", "torch": "2"}
    if rank.rank == teller % rank.world:
        facts |= changes
    try:
        rank.fabric().check_agreement({name: fact for name, fact in facts.items() if fact})
    except tg.ConfigError as error:
        return str(error)
    return ""


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


@pytest.mark.parametrize("world", [1, 2])
def test_check_agreement__of_the_same_facts(ranks, world):
    assert not any(ranks(world, other_fact, teller=0, changes={}))

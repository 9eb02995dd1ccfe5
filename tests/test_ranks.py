"""1, 2 and 8 ranks compute the same run. Also tested: the bytes they exchange, and which rank updates what.

A function with an argument `rank` runs on each of W ranks. The tests below it check what the ranks returned. Most
results are compared with those of one process, which other tests check. The order of additions depends on the number of
ranks, so float64 runs differ by rounding (measured: 1e-14 of a loss). If all values are integers, all bits are equal.
"""
import contextlib
import functools
import hashlib
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from common import exact_array, few_layers, fill_randomly, grad_of, rows_of_ngrams, set_grad, started_loader, tensors_of
from forked_ranks import COMM_TIMEOUT, Rank, Ranks
from pytest import MonkeyPatch
from reference import merge_shards
from safetensors.torch import load_file
from table_harness import PAIRS, TRIPLES

import train_gpt as tg

Arrays = dict[str, np.ndarray]

def assert_same_bits(got: Arrays, want: Arrays) -> None:
    assert got.keys() == want.keys()
    assert [key for key in want if got[key].dtype != want[key].dtype or not np.array_equal(got[key], want[key])] == []

def assert_close(got: Arrays, want: Arrays, limit: float = 1e-9) -> None:
    """Check that the norm of the difference is at most `limit` times the norm (measured: 1e-12).

    Single entries are not compared, because Adam divides by the size of the gradient. If that is nearly 0, rounding
    determines the value of an entry, even its sign. Such entries are rare.
    """
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert got[key].shape == x.shape, key
        error = np.linalg.norm(got[key] - x) / max(float(np.linalg.norm(x)), 1e-30)
        assert error <= limit, f"{key}: {error:.1e}"

def weights_of(state: Arrays) -> Arrays:
    """Return the weights without the optimizer's state, which may be more sensitive to rounding in a fork."""
    return {name: x for name, x in state.items() if "." not in name}


# ---- Whole runs ------------------------------------------------------------------------------------------------------
def state_hashes(engine: tg.Engine) -> dict[str, str]:
    return {name: hashlib.sha256(exact_array(x).tobytes()).hexdigest() for name, x in tensors_of(engine).items()}

def full_state(engine: tg.Engine, step_cfg: tg.StepConfig) -> Arrays:
    """Merge weights and optimizer state of all ranks, except rows of n-gram tables. step_cfg: that of the next step.

    Collective.
    """
    groups = engine.optimizer.groups
    full = {}
    for name, x in engine.tensors().items():
        label, *moment = name.split(".")
        by_rank = engine.comm.all_gather(exact_array(x))
        if label in engine.tables:
            full[name] = merge_shards(by_rank, engine.model.specs[label].table.num_rows)
        elif moment and isinstance(groups.get(label), tg.ShardedGroup):
            full[name] = np.concatenate(by_rank)
        else:
            full[name] = by_rank[0]
    # While head and embedding are tied, several ranks read the rows of the embedding from the head.
    return full | dict(embed=full["lm_head"].T) if step_cfg.tied else full

def tiny_config(**changes: Any) -> tg.Config:
    cfg = tg.Config(preset="tiny", **tg.PRESETS["tiny"] | dict(device="cpu", comm_timeout=COMM_TIMEOUT) | changes)
    tg.check_config(cfg)
    return cfg

FORMULA = "formula:512:511:1500:12"      # several shards; an incomplete last cycle
# In each run, head and embedding are untied, and a new stage and a validation begin in the middle of a cycle.
RUNS = {
    "all layers": dict(),
    "cycles": dict(train_files=FORMULA),
    "every step": dict(adam_every=1, tables=(replace(PAIRS, update_every=1), TRIPLES)),
    "tables": dict(tables=(replace(PAIRS, update_every=4), TRIPLES), micro_batch_size=2),
    "unseen": dict(tables=(replace(PAIRS, update_every=4), TRIPLES), micro_batch_size=2, val_every=0),
    "dense": dict(tables=(replace(PAIRS, update_every=4),), row_comms="dense", train_files=FORMULA),
}

def tiny_run(rank: Rank, name: str) -> dict[str, Any]:
    """Run tg.train on preset tiny with the changes of RUNS[name].

    Returns the losses of this rank's sequences and of validations, the state at the start and at the end, the weights
    to save, the rows that each step looked up, and what rank 0 printed.
    """
    fields = dict(run_dir=f"{rank.folder}/run", save=f"{rank.folder}/saved", dtype="float64", sample_tokens=4,
                  num_extension_steps=4) | RUNS[name]
    cfg = tiny_config(**fields)
    losses, validations, lookups, found = [], [], [], {}
    forward_backward = tg.Engine.forward_backward
    evaluate = tg.Engine.evaluate
    run_seed = tg.run_seed
    comm = rank.comm(cfg)

    def record_forward_backward(self: tg.Engine, batch: tg.Batch, step_cfg: tg.StepConfig, *rest: Any) -> tg.StepLoss:
        rows = {}
        for spec in tg.table_specs(self.cfg):
            if spec.label != "embed" or not step_cfg.tied:
                rows[spec.label] = np.unique(spec.row_ids(batch.tokens.numpy()))
        lookups.append(rows)
        out = forward_backward(self, batch, step_cfg, *rest)
        losses.append(exact_array(out.seq_sums) / step_cfg.seq_len)
        return out

    def record_evaluate(self: tg.Engine, batches: Iterable[tg.Batch], step_cfg: tg.StepConfig) -> float:
        validations.append(evaluate(self, batches, step_cfg))
        return validations[-1]

    def record_initial(_cfg: tg.Config, _comm: tg.Communicator, engine: tg.Engine, _log: tg.Log) -> None:
        found["initial"] = state_hashes(engine)

    def record_run(log: tg.Log, engine: tg.Engine, *rest: Any) -> dict[str, Any]:
        result = run_seed(log, engine, *rest)
        step_cfg = log.schedule.at(log.steps_done)
        found["state"] = full_state(engine, step_cfg)
        # A fork may save other weights than it trains, for example their average.
        found["weights"] = {name: exact_array(x) for name, x in tg.full_weights(engine, step_cfg.tied).items()}
        found["tables"] = {name: exact_array(x) for name, x in rows_of_ngrams(engine).items()}
        found["final"] = state_hashes(engine)
        found["specs"] = [spec._replace(row_ids=None) for spec in tg.table_specs(engine.cfg)]
        return result

    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        patch = stack.enter_context(MonkeyPatch.context())
        if name != "all layers":
            stack.enter_context(few_layers())
        patch.setattr(tg.Engine, "forward_backward", record_forward_backward)
        patch.setattr(tg.Engine, "evaluate", record_evaluate)
        patch.setattr(tg, "warm_up", record_initial)
        patch.setattr(tg, "run_seed", record_run)
        patch.setattr(tg, "init_distributed", lambda _: comm)
        tg.train(cfg)
    found |= dict(printed=printed.getvalue(), lookups=lookups)
    return found | dict(seq_losses=np.stack(losses), validations=np.array(validations))

def log_of(ranks: Ranks, world_size: int, name: str) -> list[dict[str, Any]]:
    text = (ranks.folder_of(world_size, tiny_run, name=name) / "run/log.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]

runs = pytest.mark.parametrize("name, world_size", [
    ("all layers", 2), ("cycles", 8), ("every step", 2), ("tables", 2), ("dense", 2),
    pytest.param("tables", 4, marks=pytest.mark.slow)])

@runs
def test_train__losses_do_not_depend_on_the_number_of_ranks(ranks, name, world_size) -> None:
    single, = ranks(1, tiny_run, name=name)
    by_rank = ranks(world_size, tiny_run, name=name)
    want = single["seq_losses"]
    # Rank s % W trains on sequence s.
    seqs = np.stack([found["seq_losses"] for found in by_rank], axis=2)
    np.testing.assert_allclose(seqs.reshape(want.shape), want, rtol=0, atol=1e-9)
    for found in by_rank:
        np.testing.assert_allclose(found["validations"], single["validations"], rtol=0, atol=1e-9)
        assert found["validations"].tobytes() == by_rank[0]["validations"].tobytes(), "all ranks have the same bits"

@runs
def test_train__weights_do_not_depend_on_the_number_of_ranks(ranks, name, world_size) -> None:
    """Replicated weights have the same bits on all ranks: at the start, without communication, and at the end."""
    single, = ranks(1, tiny_run, name=name)
    by_rank = ranks(world_size, tiny_run, name=name)
    assert_close(weights_of(by_rank[0]["state"]), weights_of(single["state"]))
    for key, x in single["tables"].items():
        assert x.any()
        assert_close({key: merge_shards([found["tables"][key] for found in by_rank], len(x))}, {key: x}, 1e-8)
    for found in by_rank:
        for label in [spec.label for spec in tg.parameter_specs(tiny_config(bigram_rows=9)) if not spec.table]:
            assert found["initial"][label] == single["initial"][label], label
            assert found["final"][label] == by_rank[0]["final"][label] != found["initial"][label], label

@pytest.mark.recipe
@runs
def test_train__moments_do_not_depend_on_the_number_of_ranks(ranks, name, world_size) -> None:
    assert_close(ranks(world_size, tiny_run, name=name)[0]["state"], ranks(1, tiny_run, name=name)[0]["state"])

def test_evaluate__in_mid_cycle_changes_no_bit(ranks) -> None:
    for seen, unseen in zip(ranks(2, tiny_run, name="tables"), ranks(2, tiny_run, name="unseen")):
        assert len(seen["validations"]) > len(unseen["validations"])
        assert seen["final"] == unseen["final"]

ROW_BYTES = 8 * 32                       # a row of preset tiny in float64

def count_trained_bytes(spec: tg.TableSpec, fetch_all: bool, by_rank: list[dict[str, Any]]) -> Counter:
    """Count the bytes that the ranks of a run move for a table, from the rows that each of them looked up.

    In each cycle, every rank requests its rows from the other ranks once, and receives them. If the cycle is completed,
    it returns the gradients of these rows.
    """
    world_size = len(by_rank)
    shard_bytes = spec.shard_rows(world_size) * ROW_BYTES
    steps = len(by_rank[0]["lookups"])
    moved = Counter()
    for first in range(0, steps, spec.update_every):
        # While the embedding is tied, its rows are read from the head.
        if spec.label not in by_rank[0]["lookups"][first]:
            continue
        fetched = 0
        for rank, found in enumerate(by_rank):
            by_step = [step[spec.label] for step in found["lookups"][first:first + spec.update_every]]
            fetched += int((np.unique(np.concatenate(by_step)) % world_size != rank).sum())
        if fetch_all and not spec.rowwise:
            fetched = world_size * (world_size - 1) * spec.shard_rows(world_size)
        # A cycle sends rows; a completed cycle also sends their gradients.
        messages = 1 + (first + spec.update_every <= steps)
        for name in ("bytes_sent", "bytes_received"):
            moved[name] += fetched * (4 + messages * ROW_BYTES)
        moved["bytes_dense"] += messages * world_size * (world_size - 1) * shard_bytes
    return moved

@pytest.mark.parametrize("name, world_size", [("cycles", 1), ("cycles", 8), ("dense", 2), ("tables", 2)])
def test_run_seed__comms_are_the_bytes_that_training_moved(ranks, name, world_size) -> None:
    """The result has the bytes by table, summed over ranks.

    They do not include validations, but include the rows of a last cycle that is incomplete.
    """
    by_rank = ranks(world_size, tiny_run, name=name)
    *_, result = log_of(ranks, world_size, name)
    steps = by_rank[0]["lookups"]
    assert len(steps) == result["steps"]
    assert "embed" not in steps[0] and "embed" in steps[-1]
    fetch_all = RUNS[name].get("row_comms") == "dense"
    expected = {spec.label: count_trained_bytes(spec, fetch_all, by_rank) for spec in by_rank[0]["specs"]}
    assert {label: Counter(counts) for label, counts in result["comms"].items()} == expected
    assert (world_size == 1) == (not any(counts["bytes_sent"] for counts in expected.values()))

def test_Log__rank_0_logs_the_whole_run(ranks) -> None:
    """The log has the tokens and the mean losses of all ranks. Only rank 0 prints; the sample is that of one rank."""
    one, many = ([entry for entry in log_of(ranks, world_size, "cycles") if entry["type"] != "phase"]
                 for world_size in (1, 8))
    assert (one[0]["world_size"], many[0]["world_size"]) == (1, 8)
    assert [entry["type"] for entry in many] == [entry["type"] for entry in one]
    for got, want in zip(many, one):
        for field in want.keys() & {"step", "tokens", "val_loss", "train_loss", "train_loss_next"}:
            assert got[field] == pytest.approx(want[field], rel=0, abs=1e-9), (want["type"], field)
    (single,), (first, *others) = (ranks(world_size, tiny_run, name="cycles") for world_size in (1, 8))
    assert first["printed"].partition(" sample ")[2] == single["printed"].partition(" sample ")[2] != ""
    assert not any(found["printed"] for found in others)
    weights = load_file(ranks.folder_of(8, tiny_run, name="cycles") / "saved/weights.safetensors")
    assert_same_bits({label: x.numpy() for label, x in weights.items()}, first["weights"])

@pytest.mark.recipe
@pytest.mark.parametrize("name, world_size", [("cycles", 8), ("tables", 2)])
def test_full_weights__those_to_save_are_the_trained_ones(ranks, name, world_size) -> None:
    """They are equal bit for bit; of an n-gram table, the rows that were looked up. A fork may save an average."""
    by_rank = ranks(world_size, tiny_run, name=name)
    weights = dict(by_rank[0]["weights"])
    for table in RUNS[name].get("tables", ()):
        rows = merge_shards([found["tables"][f"{table.label}.rows"] for found in by_rank], table.rows)
        ids = weights.pop(f"{table.label}.ids")
        assert_same_bits(dict(rows=weights.pop(f"{table.label}.rows")), dict(rows=rows[ids]))
        assert sorted(ids) == np.flatnonzero(rows.any(axis=1)).tolist()
    assert_same_bits(weights, weights_of(by_rank[0]["state"]))


# ---- Steps by hand ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def started_engine(comm: tg.Communicator, cfg: tg.Config,
                   num_steps: int) -> Iterator[tuple[tg.Engine, tg.Loader, list[tg.StepConfig]]]:
    """Build an engine with weights that make no term zero, a started loader, and the first step configs."""
    headers = tg.read_shard_headers(cfg.train_files)
    cfg = tg.resolve_sizes(cfg, headers, headers)
    engine = tg.Engine(cfg, comm, tg.attention_reference, "plain")
    fill_randomly(engine.model, comm=comm)
    # With several ranks, the tied embedding is read from the head.
    if comm.world_size == 1:
        engine.model.embed.data.copy_(engine.model.lm_head.t())
    with started_loader(cfg, comm, num_steps) as (loader, step_cfgs):
        yield engine, loader, step_cfgs

def finish_step(engine: tg.Engine, loader: tg.Loader, step_cfg: tg.StepConfig) -> None:
    """Make all calls of `train_step` except the forward and backward pass."""
    next_step_plans = loader.next_step_plans()
    engine.optim_step(step_cfg)
    engine.fetch_rows(next_step_plans)

def train_cycle(rank: Rank, uneven: bool) -> Arrays:
    """Train one cycle, and return the weights. uneven: how odd ranks call forward_backward.

    With a call per sequence, the last one first, and then a call with loss scale 0; otherwise with one call.
    """
    cfg = tiny_config(dtype="float64", adam_every=2)
    with few_layers(), started_engine(rank.comm(), cfg, 2) as (engine, loader, step_cfgs):
        for step_cfg in step_cfgs:
            batch = loader.next()
            single_seqs = [batch.map(lambda x: x[seq:seq + 1]) for seq in range(len(batch.tokens))]
            if uneven and rank.rank % 2:
                for micro_batch in single_seqs[::-1]:
                    engine.forward_backward(micro_batch, step_cfg)
                engine.forward_backward(single_seqs[0], step_cfg, 0.0)
            else:
                engine.forward_backward(batch, step_cfg)
            finish_step(engine, loader, step_cfg)
        return weights_of(full_state(engine, tg.Schedule(cfg).at(2)))

def test_forward_backward__calls_add_up_and_wait_for_no_rank(ranks) -> None:
    """Ranks may make different numbers of calls, so a call that synchronized with other ranks would hang."""
    single, *_ = ranks(1, train_cycle, uneven=False)
    for uneven in (False, True):
        assert_close(ranks(2, train_cycle, uneven=uneven)[0], single)

UNEVEN_SEQS, UNEVEN_STEPS, CYCLE = 24, 6, 2

def train_by_hand(rank: Rank, dtype: str = "float64", nan_padding: bool = False, order: int = 0) -> dict[str, Any]:
    """Train six steps with the untying. Return the state after the untying and at the end.

    Almost no size of the model is a multiple of W. Gradients are replaced by the integers of this rank's sequences, and
    those of tables by zeros (table_harness.py tests these). nan_padding: fill the padding of communication buffers with
    NaN. order: of reductions and updates; 0: the trainer's, 1: its reverse, otherwise a random one.
    """
    stages = tuple(replace(stage, batch_tokens=16 * UNEVEN_SEQS) for stage in tg.TINY["stages"])
    cfg = tiny_config(seqs_per_step=UNEVEN_SEQS, stages=stages, val_batch_tokens=16 * UNEVEN_SEQS,
                      val_tokens=16 * UNEVEN_SEQS, dtype=dtype, num_heads=2, head_dim=8, model_dim=16,
                      padded_vocab=513, bigram_rows=7, adam_every=CYCLE,
                      num_scheduled_steps=3, num_extension_steps=UNEVEN_STEPS - 3)
    schedule = tg.Schedule(cfg)
    assert 0 < schedule.last_tied_step < UNEVEN_STEPS - 1
    padding = 0
    found = {}
    polar_express = tg.polar_express
    with few_layers(), MonkeyPatch.context() as patch:
        # A rank has fewer matrices than a single process, and on a CPU the rounding of a batched bf16 matmul depends on
        # the number of matrices. Orthogonalize each matrix by itself, so that only the distribution is tested.
        patch.setattr(tg, "polar_express", lambda x: torch.cat([polar_express(matrix) for matrix in x.split(1)]))
        labels = list(tg.UPDATE_ORDER)
        orders = (labels, labels[::-1], np.random.default_rng(order).permutation(labels).tolist())
        patch.setattr(tg, "UPDATE_ORDER", orders[order])
        if nan_padding:
            patch.setattr(torch.nn.functional, "pad", functools.partial(torch.nn.functional.pad, value=math.nan))
        with started_engine(rank.comm(), cfg, UNEVEN_STEPS) as (engine, loader, step_cfgs):
            optimizer = engine.optimizer
            for group in [x for x in optimizer.groups.values() if isinstance(x, tg.ShardedGroup)]:
                count = group.weight.numel() // group.padded[0].numel()
                for buffer in (group.padded, group.main_grad, group.comm_buffer):
                    padding += len(buffer[count:])
                    if nan_padding:
                        buffer[count:] = math.nan
            for step_cfg in step_cfgs:
                so_far = {label: grad_of(optimizer, label) for label in engine.model.specs}
                so_far = {label: grad.clone() for label, grad in so_far.items() if grad is not None}
                engine.forward_backward(loader.next(), step_cfg)
                for spec in engine.model.specs.values():
                    if spec.label in engine.tables:
                        engine.tables[spec.label].row_grads.zero_()
                    else:
                        # Sums of integers over sequences and a cycle are exact in every dtype.
                        generator = torch.Generator().manual_seed(zlib.crc32(f"{step_cfg.step}/{spec.label}".encode()))
                        by_seq = torch.randint(-2, 3, (UNEVEN_SEQS, *spec.shape), generator=generator)
                        grad = by_seq[rank.rank::rank.world].sum(dim=0)
                        set_grad(optimizer, spec.label, grad + so_far.get(spec.label, 0))
                finish_step(engine, loader, step_cfg)
                if step_cfg.untie_after:
                    found["untied"] = full_state(engine, schedule.at(step_cfg.step + 1))
            return found | dict(end=full_state(engine, schedule.at(UNEVEN_STEPS)), padding=padding)

@pytest.mark.parametrize("world_size, dtype", [(2, "float64"), (2, "bfloat16"), (8, "bfloat16"),
                                               pytest.param(3, "float64", marks=pytest.mark.slow)])
def test_step__exact_sums_give_the_same_bits_at_every_world_size(ranks, world_size, dtype) -> None:
    """The gradients are integers, so that their sums are exact, tied and untied.

    There are 24 sequences. The factor 1/24 is not exact in binary, so it must not be applied before the sums.
    """
    single, = ranks(1, train_by_hand, dtype=dtype)
    first, *_ = ranks(world_size, train_by_hand, dtype=dtype)
    for when in ("untied", "end"):
        assert_same_bits(first[when], single[when])
    # The head is sharded along D, the embedding along V.
    for ending in ("", ".m", ".v"):
        np.testing.assert_array_equal(first["untied"][f"embed{ending}"], first["untied"][f"lm_head{ending}"].T)
    without_gradients = "bigram_embed", "value_embed"
    zero = {name for name, x in single["end"].items() if name.split(".")[0] not in without_gradients and not x.any()}
    assert zero <= {"attn.second", "mlp.second"}, "these two only in a fork without NorMuon's second moment"
    assert ("mlp.mantissa" in single["end"]) == (dtype == "bfloat16")

def test_ShardedGroup__padding_changes_no_bit(ranks) -> None:
    by_rank = ranks(8, train_by_hand, nan_padding=True, dtype="bfloat16")
    assert all(found["padding"] for found in by_rank)
    assert_same_bits(by_rank[0]["end"], ranks(8, train_by_hand, dtype="bfloat16")[0]["end"])

@pytest.mark.parametrize("order", [1, 2])
def test_UPDATE_ORDER__any_order_of_communication_gives_the_same_bits(ranks, order) -> None:
    found, want = (ranks(2, train_by_hand, **changes)[0] for changes in (dict(order=order), dict(dtype="float64")))
    assert_same_bits(found["end"], want["end"])

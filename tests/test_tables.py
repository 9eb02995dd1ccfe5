"""N-gram tables: row-wise updates compared with a naive dense model, memory, reset, checkpoints and saves, the model.

The functions with an argument `rank` run on each of W ranks. The tests after them check what the ranks returned.
"""
from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import (ROOT, Run, exact_array, few_layers, fill_randomly, launch, losses, make_comm, make_engine, preset,
                    started_loader, tensors_of, weights)
from forked_ranks import Rank
from reference import merge_shards, ngram_rows
from safetensors.torch import load_file
from table_harness import PAIRS, PATTERNS, TRIPLES, Trial, differences, drive
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train_gpt as tg

SLOW = pytest.param(4, marks=pytest.mark.slow)


# ---- The row-wise update, without a model ----------------------------------------------------------------------------
SIZES = (53, 97, 31, 40, 29, 3)          # numbers of rows; 3 is less than some W
FEW_TABLES = (("uniform", 53), ("uniform", 5), ("looked up again", 64), ("every other update", 40),
              ("odd sequences empty", 53))

def run_trial(rank: Rank, trial: Trial) -> dict[str, dict[str, Any]]:
    """Run the trial on this rank."""
    return drive(rank.comm(), trial)

@pytest.mark.parametrize("world_size", [1, 2, SLOW, 8], ids="W{}".format)
@pytest.mark.parametrize("update_every", [2, 4])
def test_rowwise_update__of_requested_rows_equals_the_dense_model(ranks, world_size, update_every) -> None:
    """Updating only the requested rows gives the results of updating the whole table."""
    tables = tuple((pattern, SIZES[i % len(SIZES)]) for i, pattern in enumerate(PATTERNS))
    slow = world_size > 2 and update_every > 2
    trial = Trial(FEW_TABLES if slow else tables, rowwise=True, update_every=update_every)
    assert differences(trial, ranks(world_size, run_trial, trial=trial)) == []

def test_rowwise_update__in_bf16_to_the_bit(ranks) -> None:
    """One rank and two ranks give the same bits in bf16, because all sums are exact in these trials."""
    trial = Trial(FEW_TABLES, rowwise=True, dtype="bfloat16")
    one_rank, two_ranks = (ranks(world_size, run_trial, trial=trial) for world_size in (1, 2))
    assert differences(trial, one_rank) == []
    for (label, found), name in itertools.product(one_rank[0].items(), ("rows", "v", "last")):
        num_rows = len(found["last"])
        merged = merge_shards([results[label][name] for results in two_ranks], num_rows)
        assert found[name].tobytes() == merged.tobytes(), f"{label}: {name}"

@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rowwise_update__compiled_has_the_same_bits_and_one_graph_for_any_number_of_rows(backend) -> None:
    """The compiled update gives the bits of eager code in bf16, with one graph for any number of rows.

    Sums of squares of these gradients are exact in any order.
    """
    backend_counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(tg.rowwise_update, backend=backend_counter, dynamic=False, fullgraph=True)
    update_num = torch.tensor(7, dtype=torch.int32)
    frame_counts = []
    for num_rows in (37, 90):
        generator = torch.Generator().manual_seed(num_rows)
        rows = torch.randn(num_rows, 32, generator=generator)
        grad = torch.randint(-8, 9, (num_rows, 32), generator=generator) / 8
        last = torch.randint(0, 7, (num_rows,), generator=generator, dtype=torch.int32)
        results = []
        for update in (tg.rowwise_update, compiled):
            args = [rows.bfloat16(), rows[:, 0].square(), last.clone(), grad.clone()]
            for x in args:
                torch._dynamo.maybe_mark_dynamic(x, 0)
            *active, grad_copy = args
            update(*active, grad_copy, 1 / 8, update_num, 0.95, 1e-10, tg.cpu_scalar(0.3), tg.cpu_scalar(0.01))
            results.append(active)
        eager_active, compiled_active = results
        assert all(x.equal(y) for x, y in zip(eager_active, compiled_active))
        assert not eager_active[0].equal(rows.bfloat16())
        frame_counts.append(backend_counter.frame_count)      # includes retracing
    assert frame_counts[1] == frame_counts[0] > 0


# ---- Memory and reset ------------------------------------------------------------------------------------------------
LARGE_RUN = """
import re, sys
from pathlib import Path
import train_gpt
status = train_gpt.main(sys.argv[1:])
print("high-water mark", re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(status)
"""

@pytest.mark.skipif(sys.platform != "linux", reason="other systems may allocate the memory of the whole table")
def test_RowwiseTable__memory_grows_only_with_touched_rows(tmp_path) -> None:
    """Warm-up, reset, training, checkpoints and save of a table of 10^8 rows need at most 1 GB. It would have 13 GB."""
    num_rows = 10**8                     # more than 2^31 elements
    result = subprocess.run(
        [sys.executable, "-c", LARGE_RUN, "--preset=tiny", "--device=cpu", f"--run_dir={tmp_path / 'run'}",
         f"--tables=[('trigram_embed', 3, {num_rows})]", "--checkpoint_every=6", f"--save={tmp_path / 'save'}"],
        cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split("high-water mark ")[1]) * 1024 <= 10**9
    saved = load_file(tmp_path / "save/weights.safetensors")
    ids = saved["trigram_embed.ids"]
    rows = saved["trigram_embed.rows"]
    assert len(ids) > 1000 and (ids.diff() > 0).all() and rows.any(dim=1).float().mean() > 0.9
    assert ids[-1] * rows.shape[1] > 2**31 and ids[-1] < num_rows
    checkpoint = torch.load(tmp_path / "run" / tg.CHECKPOINT_DIR / "step-0000012/rank0.pt")
    assert checkpoint["rows"]["trigram_embed"]["local_rows"].equal(ids)
    assert checkpoint["rows"]["trigram_embed"]["rows"].equal(rows)

def tables_engine(seed: int) -> tg.Engine:
    """Build an engine in bf16 with two n-gram tables, updated every 2 and 4 steps."""
    trigrams = replace(TRIPLES, rows=20_000, update_every=4)
    return make_engine(preset(tables=(PAIRS, trigrams), num_scheduled_steps=6, dtype="bfloat16", seed=seed))

def train(engine: tg.Engine, steps: int) -> dict[str, bytes]:
    """Train for a number of steps; return the state."""
    with started_loader(engine.cfg, engine.comm, steps) as (loader, step_cfgs):
        for step_cfg in step_cfgs:
            tg.train_step(engine, loader, step_cfg)
    return state_bytes(engine)

def state_bytes(engine: tg.Engine) -> dict[str, bytes]:
    """Return all state as bytes."""
    return {name: exact_array(x).tobytes() for name, x in tensors_of(engine).items()}

def test_reset__in_the_middle_of_a_cycle_gives_a_new_engine_of_the_seed() -> None:
    """After a reset, tables have no touched rows, and a run has the bits of a separate run with its seed."""
    with few_layers():
        engine, separate = tables_engine(4), tables_engine(5)
        start = state_bytes(engine)
        first = train(engine, 5)
        table = engine.tables["trigram_embed"]
        assert 0 < len(table.touched_rows()) <= 4 * max(stage.batch_tokens for stage in engine.cfg.stages)
        assert table.has_gradient(), "in the middle of a cycle"

        engine.reset(4)
        assert state_bytes(engine) == start and len(table.touched_rows()) == 0 and not table.has_gradient()
        assert train(engine, 5) == first
        engine.reset(5)
        second = train(engine, 6)
        assert second == train(separate, 6)
        assert first["trigram_embed.rows"] != second["trigram_embed.rows"]

def test_Engine__for_evaluation_has_rows_but_no_gradients() -> None:
    """Without training, tables have neither a cache nor gradients, and there is no optimizer."""
    cfg = preset(tables=(PAIRS,))
    engine = tg.Engine(cfg, make_comm(), tg.attention_reference, head_precision=None)
    table, *others = engine.tables[PAIRS.label], engine.tables["embed"], engine.tables["value_embed"]
    assert engine.optimizer is None and len(table.cache) == len(table.row_grads) == 0 and len(table.shard) == PAIRS.rows
    assert all(len(other.grad) == 0 for other in others)


# ---- Checkpoints and saves -------------------------------------------------------------------------------------------
TABLES = "[('more_bigram_embed', 2, 700), ('trigram_embed', 3, 1000, None, 4)]"           # updated every 2 and 4 steps
LABELS = ("more_bigram_embed", "trigram_embed")
RUNS = ((1, "float64"), (2, "float64"), (2, "bfloat16"))      # numbers of ranks, and dtypes
LOSS_TOLERANCE = 1e-8                    # absolute
ROW_TOLERANCE = 1e-6                     # relative; errors reach 6e-8 if a fork divides by small norms

def run_ok(folder: Path, world_size: int, *flags: str) -> Run:
    """Run on a number of ranks, check that all exit with status 0, and return the run as seen by rank 0."""
    by_rank = launch(folder, world_size, "--sample_tokens=0", *flags)
    assert [rank.status for rank in by_rank] == [0] * world_size, by_rank[0].err
    return by_rank[0]

@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with a save, and with checkpoints of steps 8 and 12, the last one."""
    folder = tmp_path_factory.mktemp("tables")
    for world_size, dtype in RUNS:
        flags = f"--tables={TABLES}", f"--dtype={dtype}", "--adam_lr=0.1", "--checkpoint_every=4"
        run_ok(folder / f"run{world_size}{dtype}", world_size, *flags, f"--save={folder / f'save{world_size}{dtype}'}")
    return folder

def checkpoint_rows(run_dir: Path, step: int, label: str) -> list[dict[str, Tensor]]:
    """Return the rows of a table in a checkpoint, by rank."""
    paths = sorted((run_dir / tg.CHECKPOINT_DIR / f"step-{step:07d}").iterdir())
    return [torch.load(path)["rows"][label] for path in paths]

def in_order(ids: Tensor, *columns: Tensor) -> list[Tensor]:
    """Sort the global rows; return them and the columns in their order."""
    order = ids.sort().indices
    return [x[order] for x in (ids, *columns)]

def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether tensors are equal: floats within the tolerance, relative to the largest, others exactly."""
    return all(x.shape == y.shape and
               (x - y).abs().max() <= (ROW_TOLERANCE * y.abs().max() if y.is_floating_point() else 0)
               for x, y in zip(found, expected, strict=True))

@pytest.mark.parametrize("label", LABELS)
def test_write_checkpoint__every_owner_writes_its_touched_rows(runs, label) -> None:
    """Rows of two ranks in a checkpoint, put together, are those of one rank, up to rounding."""
    (one_rank,), two_ranks = (checkpoint_rows(runs / f"run{W}float64", 8, label) for W in (1, 2))
    for rank_rows in (one_rank, *two_ranks):
        assert {*rank_rows} == {"local_rows", *tg.RowState._fields}
        assert (rank_rows["local_rows"].diff() > 0).all() and (rank_rows["last"] > 0).all()
    merged = [torch.cat([rank_rows[name] for rank_rows in two_ranks]) for name in tg.RowState._fields]
    ids = torch.cat([rank_rows["local_rows"] * 2 + rank for rank, rank_rows in enumerate(two_ranks)])
    assert close(in_order(ids, *merged), [one_rank["local_rows"], *(one_rank[name] for name in tg.RowState._fields)])
    for world_size, num_rows in ((1, len(one_rank["last"])), (2, len(ids))):
        result, = Run(runs / f"run{world_size}float64", 0, "", "").of("result")
        saved = load_file(runs / f"save{world_size}float64/weights.safetensors")
        assert 0 < num_rows < result["touched_rows"][label] == len(saved[f"{label}.ids"])

def test_save_weights__of_one_rank_and_of_two_are_the_same_to_rounding(runs) -> None:
    """Runs with one and with two ranks have the same validation losses, and save the same rows, up to rounding."""
    saves = [load_file(runs / f"save{world_size}float64/weights.safetensors") for world_size in (1, 2)]
    for label in LABELS:
        one_rank, two_ranks = (in_order(saved[f"{label}.ids"], saved[f"{label}.rows"]) for saved in saves)
        assert close(two_ranks, one_rank) and one_rank[1].any()
    one_rank, two_ranks = ([event[3] for event in losses(runs / f"run{world_size}float64") if event[0] == "val"]
                           for world_size in (1, 2))
    assert two_ranks == pytest.approx(one_rank, abs=LOSS_TOLERANCE)

@pytest.mark.parametrize("world_size, dtype", RUNS)
def test_load_checkpoint__resumes_bitwise(runs, tmp_path, world_size, dtype) -> None:
    """A resumed run has the losses, weights and rows, in its save and its checkpoints, of an uninterrupted one."""
    case = f"{world_size}{dtype}"
    earlier = shutil.copytree(runs / f"run{case}", tmp_path / "earlier")
    shutil.rmtree(earlier / tg.CHECKPOINT_DIR / "step-0000012")               # as if the run had been killed before
    resumed_run = run_ok(tmp_path / "run", world_size, f"--resume={earlier}", f"--save={tmp_path / 'save'}")
    assert losses(tmp_path / "run") == losses(runs / f"run{case}")
    assert weights(tmp_path / "save") == weights(runs / f"save{case}")
    for label in LABELS:
        by_rank = (checkpoint_rows(folder, 12, label) for folder in (tmp_path / "run", runs / f"run{case}"))
        for found, expected in zip(*by_rank, strict=True):
            assert found.keys() == expected.keys() and all(x.equal(expected[name]) for name, x in found.items()), label
    resumed, = resumed_run.of("resumed")
    assert resumed["step"] == 8


# ---- The model -------------------------------------------------------------------------------------------------------
GATED_LAYER = 2                          # a paired layer with a value embedding; its gate does not read the row
TABLE_ROWS = 61
TRIGRAM_FACTORS = (17351, 60961, 45259)

def dense_rows(tokens: np.ndarray, weights: Tensor) -> Tensor:
    """Compute what the table adds at each position, by operations that autograd supports."""
    rows = np.stack([ngram_rows(x, TRIGRAM_FACTORS, TABLE_ROWS) for x in tokens])
    return F.embedding(torch.from_numpy(rows), weights)

def losses_and_gradients(engine: tg.Engine) -> tuple[list[Tensor], tg.Batch]:
    """Return loss sums, gradient of the head and validation loss of the first batch; and that batch."""
    cfg = engine.cfg
    with started_loader(cfg, engine.comm, 1) as (loader, step_cfgs):
        step_cfg, = step_cfgs
        batch = loader.next()
    seq_sums = engine.forward_backward(batch, step_cfg).seq_sums
    loss = torch.tensor(engine.evaluate([batch], step_cfg))
    return [seq_sums, engine.model.lm_head.main_grad, loss], batch

@pytest.mark.parametrize("layer", [None, GATED_LAYER], ids=["residual stream", "value stream"])
def test_GPT__uses_an_ngram_table_like_a_dense_one(monkeypatch, layer) -> None:
    """Losses and gradients are those of a model without n-gram tables to which the rows are added by autograd.

    The rows are added to the bigram rows of every layer, or to the value embedding of one layer.
    """
    ngram = tg.NgramTable("trigram_embed", 3, TABLE_ROWS, layer)
    engine = make_engine(preset(tables=(ngram,), dtype="float64"))
    fill_randomly(engine.model)
    label, idx = "value_embed", tg.LAYERS[GATED_LAYER].value_embed
    gates = engine.model.ve_gate_bank.data
    if layer is None:                                         # use the coefficients of the bigram table
        label, idx = "bigram_embed", 0
        sizes = engine.model.scalar_sizes
        scalars = dict(zip(sizes, engine.model.scalars.data.split(list(sizes.values()))))
        scalars[ngram.label].copy_(scalars["bigram"])
    else:                                                     # use the gate of the layer's value embedding
        gates[-1] = gates[idx]
    table = engine.tables[ngram.label]
    weights = torch.randn(table.shard.shape, generator=torch.Generator().manual_seed(1)).double()
    table.shard.copy_(weights)
    results, batch = losses_and_gradients(engine)
    grad = torch.zeros_like(weights)
    planned_rows = batch.plans[ngram.label].rows_to_fetch
    grad[planned_rows] = table.row_grads[:len(planned_rows)]

    plain_engine = make_engine(preset(dtype="float64"))
    for name, p in plain_engine.model.named_parameters():     # without what the table appended
        p.data.copy_(engine.model.get_parameter(name).detach()[:len(p)])
    weights.requires_grad_()
    lookup = tg.GPT.lookup

    def lookup_with_table(self: tg.GPT, table_label: str, batch: tg.Batch, row_buffers: dict) -> list[Tensor]:
        rows = lookup(self, table_label, batch, row_buffers)
        if table_label == label:
            rows[idx] = rows[idx] + dense_rows(batch.tokens.numpy(), weights)
        return rows
    monkeypatch.setattr(tg.GPT, "lookup", lookup_with_table)
    expected_results, _ = losses_and_gradients(plain_engine)
    for x, expected in zip([*results, grad], [*expected_results, weights.grad]):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(x, expected, rtol=1e-10, atol=1e-12)

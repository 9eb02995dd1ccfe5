"""N-gram tables: row-wise updates compared with a naive dense model, and memory.

Tables in the model: test_model.py; checkpoints and saves: test_files.py; resets: test_step.py; runs: test_ranks.py.
"""
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from common import ROOT, make_comm, preset
from forked_ranks import Rank
from reference import merge_shards
from safetensors.torch import load_file
from table_harness import PAIRS, PATTERNS, Trial, differences, drive
from torch._dynamo.testing import CompileCounterWithBackend

import train_gpt as tg


# ---- The row-wise update, without a model ----------------------------------------------------------------------------
SIZES = (53, 97, 31, 40, 29, 3)          # numbers of rows; 3 is less than some W
FEW_TABLES = (("uniform", 53), ("uniform", 5), ("looked up again", 64), ("every other update", 40),
              ("odd sequences empty", 53))

def run_trial(rank: Rank, trial: Trial) -> dict[str, dict[str, Any]]:
    return drive(rank.comm(), trial)

@pytest.mark.recipe
@pytest.mark.parametrize("world_size", [1, 2, 8], ids="W{}".format)
@pytest.mark.parametrize("update_every", [2, 4])
def test_rowwise_update__of_requested_rows_equals_the_dense_model(ranks, world_size, update_every) -> None:
    tables = tuple((pattern, SIZES[i % len(SIZES)]) for i, pattern in enumerate(PATTERNS))
    trial = Trial(FEW_TABLES if world_size > 2 else tables, rowwise=True, update_every=update_every)
    assert differences(trial, ranks(world_size, run_trial, trial=trial)) == []

@pytest.mark.recipe
def test_rowwise_update__in_bf16_to_the_bit(ranks) -> None:
    """One rank and two ranks give the same bits in bf16, because all sums are exact in these trials."""
    trial = Trial(FEW_TABLES, rowwise=True, dtype="bfloat16")
    one_rank, two_ranks = (ranks(world_size, run_trial, trial=trial) for world_size in (1, 2))
    assert differences(trial, one_rank) == []
    for (label, found), name in itertools.product(one_rank[0].items(), ("rows", "v", "last_update")):
        num_rows = len(found["last_update"])
        merged = merge_shards([results[label][name] for results in two_ranks], num_rows)
        assert found[name].tobytes() == merged.tobytes(), f"{label}: {name}"

def test_rowwise_update__compiled_has_the_same_bits_and_one_graph_for_any_number_of_rows() -> None:
    """In bf16. Sums of squares of these gradients are exact in any order."""
    backend_counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tg.rowwise_update, backend=backend_counter, dynamic=False, fullgraph=True)
    update_num = torch.tensor(7, dtype=torch.int32)
    frame_counts = []
    for num_rows in (37, 90):
        generator = torch.Generator().manual_seed(num_rows)
        rows = torch.randn(num_rows, 32, generator=generator)
        grad = torch.randint(-8, 9, (num_rows, 32), generator=generator) / 8
        last_update = torch.randint(0, 7, (num_rows,), generator=generator, dtype=torch.int32)
        results = []
        for update in (tg.rowwise_update, compiled):
            args = [rows.bfloat16(), rows[:, 0].square(), last_update.clone(), grad.clone()]
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


# ---- Memory ----------------------------------------------------------------------------------------------------------
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

def test_Engine__for_evaluation_has_rows_but_no_gradients() -> None:
    cfg = preset(tables=(PAIRS,))
    engine = tg.Engine(cfg, make_comm(), tg.attention_reference, head_precision=None)
    assert engine.optimizer is None and len(engine.tables[PAIRS.label].shard) == PAIRS.rows
    assert all(len(table.cache) == len(table.row_grads) == 0 for table in engine.tables.values())

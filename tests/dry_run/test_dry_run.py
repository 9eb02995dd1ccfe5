"""The dry run: its counts match the expected costs, and it reports every planted mistake."""
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from common import ROOT

from dry_run import command, price

REASON = command.unsupported_reason()
TIMEOUT_S = 3600                         # for walks on a busy machine
needs_tool = pytest.mark.skipif(bool(REASON), reason=f"dry run: {REASON}")
EXPECTED_COSTS = json.loads(price.EXPECTED_COSTS.read_text())

def assert_succeeds(folder: Path, compile_cache: Path, *arguments: str) -> None:
    environment = dict(os.environ, DRY_RUN_CACHE=str(compile_cache), OMP_NUM_THREADS="1",
                       PYTHONPATH=str(folder / "tests"))
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout

@needs_tool
@pytest.mark.slow
@pytest.mark.style
def test_dry_run__all_stages_match_the_expected_costs(compile_cache) -> None:
    assert_succeeds(ROOT, compile_cache, "tests/dry_run.py")


# ---- Counts of single operations, in bytes and flops
ROWS, WIDTH, INDEXED_ROWS = 100, 8, 5    # sizes of an f32 matrix; number of indices
MATRIX_BYTES = 4 * ROWS * WIDTH
INDEXED_BYTES = 8 * INDEXED_ROWS + 4 * INDEXED_ROWS * WIDTH   # indices (i64) and their rows (f32)
OPERATIONS = {                           # operation -> bytes, flops
    "aten.mm": (MATRIX_BYTES + 4 * WIDTH * 3 + 4 * ROWS * 3, 2 * ROWS * WIDTH * 3), "aten.exp": (2 * MATRIX_BYTES, 0),
    "aten.zero_": (MATRIX_BYTES, 0), "aten.index_put_": (INDEXED_BYTES + 4 * INDEXED_ROWS * WIDTH, 0),
    "aten.index": (INDEXED_BYTES + 4 * INDEXED_ROWS * WIDTH, 0), "aten.copy_": (2 * 4 * INDEXED_ROWS * WIDTH, 0),
    "aten._to_copy": (MATRIX_BYTES + MATRIX_BYTES // 2, 0)}

@needs_tool
def test_Tally__counts_agree_with_independent_counts() -> None:
    """Bytes and operations; waits for a scalar, blocking copies and pageable memory; memory that a view keeps."""
    from dry_run import counts, fake_cuda                     # only where `needs_tool` has found the right torch
    tally = counts.Tally(1, [])
    aten = torch.ops.aten                                     # methods of tensors would look for a device
    with fake_cuda.Card(tally):
        matrix = torch.empty(ROWS, WIDTH, device="cuda")
        rows = torch.empty(INDEXED_ROWS, WIDTH, device="cuda")
        index = torch.empty(INDEXED_ROWS, dtype=torch.int64, device="cuda")
        matrix @ torch.empty(WIDTH, 3, device="cuda")
        matrix.exp()
        matrix.zero_()
        matrix.index_put_((index,), rows)
        aten.index(matrix, [index])
        aten.copy_(rows, aten.slice(matrix, 0, 0, INDEXED_ROWS))
        matrix.bfloat16()
        counted = {kernel["name"]: (kernel["bytes"], kernel.get("flops", 0)) for kernel in tally.kernels.values()}
        assert counted == OPERATIONS

        tally.timed = True
        on_device = torch.empty(4, device="cuda")
        pinned = torch.empty(4)
        pinned.pinned = True
        waiting = [on_device.sum().item, on_device.cpu, partial(aten._to_copy, torch.empty(4), device="cuda"),
                   partial(aten._to_copy, torch.empty(4), device="cuda", non_blocking=True)]
        for number, call in enumerate(waiting, 1):
            call()
            assert tally.host_waits.total() == number, call
        aten._to_copy(pinned, device="cuda", non_blocking=True)
        assert tally.host_waits.total() == len(waiting)

        tally.begin("memory")
        before = tally.bytes_now
        first = torch.empty(1000, device="cuda")
        second = torch.empty(500, device="cuda")
        view = aten.slice(first, 0, 10)
        del first
        assert tally.bytes_now == before + 6000
        del second, view
        third = torch.empty(100, device="cuda")
        assert tally.phase["peak_bytes"] == before + 6000 and tally.bytes_now == before + third.nbytes


# ---- Planted mistakes, in a copy of the trainer
STEP = "        self.optimizer.step(step_cfg)\n"
SUMS = "            seq_sums_by_micro_batch.append(seq_sums.detach())\n"
ADD = "        add_rows(ctx.row_grads, index, grad)\n"
SCRATCH = "ctx.grad_target.add_gradient(grad_w, b=None)"
LAUNCH = "BLOCK_ROWS=ADD_ROWS_BLOCK"
HIDDEN = "        x = x0\n"
DYNAMIC = "torch._dynamo.maybe_mark_dynamic(micro_batch.cu_seqlens, 1)"
LOGITS = "logits_dtype, fast_accum=True"
PINNED = "map(comm.pinned, unique_and_inverse)"
EAGER = ["none", "--max_steps=6"]        # the steps of the first stage
NGRAM_TABLE = [*EAGER, "--preset=tiny", "--dtype=bfloat16", "--tables=[('trigram_embed', 3, 1000)]"]
FIRST_GRAPHS = ["1", "--max_steps=6"]
PLANTED = {  # name -> replacements in the source, stages and flags of the walk, expected messages (kind, where)
    "none": ({}, FIRST_GRAPHS, []),
    "waits, buffers, a spill": (
        {SUMS: SUMS + "            print(float(seq_sums.sum()))\n",
         STEP: "        spare = [torch.zeros_like(table.row_grads) for table in self.tables.values()]\n" + STEP,
         ADD: "        bank = grad.new_zeros(22, 3072, 768)\n" + ADD,
         SCRATCH: SCRATCH.replace("grad_w, b", "grad_w.clone(), b"),
         LAUNCH: f"maxnreg=24, {LAUNCH}"}, EAGER,
        [("spill", "add_rows_kernel"), ("buffer of table size", "spare = [torch.zeros_like"),
         ("buffer of a gradient's size", "RowLookup.backward: bank = "),
         ("buffer of a gradient's size", "grad_w.clone()"),
         ("host wait", "Engine.forward_backward: print(float(seq_sums.sum()))")]),
    "a graph break": ({HIDDEN: HIDDEN + "        x = x if x.sum() > 0 else -x\n"}, FIRST_GRAPHS,
                      [("graph break", "x = x if x.sum() > 0")]),
    "a number of documents": ({DYNAMIC: "torch._dynamo.mark_static(micro_batch.cu_seqlens)"}, FIRST_GRAPHS,
                              [("recompile", "GPT.hidden_states forward, stage 1")]),
    "logits in f32": ({LOGITS: "accum, fast_accum=True"}, FIRST_GRAPHS,
                      [("f32 buffer of (tokens, vocabulary)", "aten._scaled_mm")]),
    "a row plan that is not pinned": ({PINNED: PINNED.replace("comm.pinned", "torch.from_numpy")}, NGRAM_TABLE,
                                      [("host wait", "RowPlan.move_to: setattr(")]),
}

@pytest.mark.style
def test_walk__every_planted_line_exists_once_and_so_does_every_allowed_wait() -> None:
    """A mistake can be planted only if its line of the trainer exists. This test checks the slow cases too."""
    trainer = (ROOT / "train_gpt.py").read_text("utf-8")
    assert all(f"  {line.partition(': ')[2]}\n" in trainer for line in command.ALLOWED_WAITS)
    counts = {text: trainer.count(text) for changes, _, _ in PLANTED.values() for text in changes}
    assert set(counts.values()) == {1}, counts

@needs_tool
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_walk__a_mistake_in_the_trainer_is_reported(tmp_path, compile_cache, name) -> None:
    changes, walk_args, expected = PLANTED[name]
    text = (ROOT / "train_gpt.py").read_text("utf-8")
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "train_gpt.py").write_text(text, "utf-8")
    shutil.copytree(ROOT / "tests/dry_run", tmp_path / "tests/dry_run", ignore=shutil.ignore_patterns("__pycache__"))
    assert_succeeds(tmp_path, compile_cache, "-m", "dry_run.walk", "found.json", "8", "H100", *walk_args)
    found = json.loads((tmp_path / "found.json").read_text())
    messages = command.find_failures(dict(worlds={"8": found}))
    for kind, where in expected:
        assert any(f"{kind}: " in line and where in line for line in messages), (kind, where, messages)
    kinds = {kind for kind, _ in expected}
    assert all(any(f"{kind}: " in line for kind in kinds) for line in messages), messages
    assert found["phases"]

@pytest.mark.style
def test_find_failures__none_in_the_expected_costs_whose_prices_have_the_present_rates() -> None:
    assert command.find_failures(EXPECTED_COSTS) == [] and set(EXPECTED_COSTS["worlds"]) == {"1", "8"}
    rates_sha256 = hashlib.sha256(price.RATES.read_bytes()).hexdigest()
    assert EXPECTED_COSTS["rates_sha256"] == rates_sha256, "rates.json has changed: dry_run.py --update"
    for world_size in EXPECTED_COSTS["worlds"]:
        fa3, fa2 = (price.stage_times(EXPECTED_COSTS, world_size, attention, EXPECTED_COSTS["steps"])[-1]
                    for attention in ("FA3", "FA2"))
        assert 0 < fa3 < fa2
    assert command.growth_beyond_limit(EXPECTED_COSTS, copy.deepcopy(EXPECTED_COSTS)) == []


# ---- The command, with synthetic walks
def make_walk(lines: int = 20, launches: int = 10, size: int = 10**6, **changes: Any) -> dict[str, Any]:
    """Build the result of a walk with one step: kernels k0, k1, ... of decreasing size, more than the file names."""
    kernels = {}
    for i in range(lines):
        kernels[f"k{i}"] = dict(kind="generated", name=f"kernel_{i}", bytes=10**6 - i * 10**3)
    timeline = [["run", key, launches] for key in kernels] + [["collective", 1, "all_reduce", 100 * size, "bfloat16"]]
    phase = dict(timeline=timeline, peak_bytes=100 * size)
    return dict(kernels=kernels, graphs={"GPT.losses forward": 1}, phases={"stage 1 even step": phase},
                host_waits={}, failures=[], steps={"stage 1": dict(even=7, odd=0)}) | changes

@pytest.fixture
def run_dry_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs the command with this walk and these flags; it returns exit status and output."""
    def call(found: dict[str, Any], *flags: str) -> tuple[int, str]:
        monkeypatch.setattr(command, "run_walks", lambda args: {name: copy.deepcopy(found) for name in args.gpus})
        return command.main(flags), capsys.readouterr().out

    monkeypatch.setattr(command, "unsupported_reason", str)
    monkeypatch.setattr(price, "EXPECTED_COSTS", tmp_path / "expected_costs.json")
    price.EXPECTED_COSTS.write_text(json.dumps(dict(card="H100", attention=[], steps={}, worlds={})))
    assert call(make_walk(), "--update")[0] == 0
    return call

GROWN = {                                # change -> walk, lines that are named
    "launches 200 -> 220": (make_walk(launches=11), ["kernel_0 +1", "others +9"]),
    "launches 200 -> 210": (make_walk(lines=21), ["others +10"]),
    "peak_bytes 100.0 MB -> 200.0 MB": (make_walk(size=2 * 10**6), []),
    "collective_bytes 100.0 MB -> 200.0 MB": (make_walk(size=2 * 10**6), ["all_reduce of bfloat16 +100.0 MB"])}

@pytest.mark.parametrize("change", GROWN)
def test_growth_beyond_limit__fails_by_name_until_update_accepts_it(run_dry_run, change) -> None:
    assert run_dry_run(make_walk())[0] == 0
    found, culprits = GROWN[change]
    status, output = run_dry_run(found)
    start = f"growth: W = 8, stage 1 even step: {change}"
    report, = (text for text in output.split("FAILED  ") if text.startswith(start))
    assert status == 1 and all(name in report for name in culprits), output
    assert "FA2, now" in output and "FA3, now" in output
    assert run_dry_run(found, "--update")[0] == 0 and run_dry_run(found)[0] == 0

FORBIDDEN = {                            # kind of failure -> changes of the walk
    "spill": dict(failures=["spill: triton_red: 16 bytes"]),
    "recompile": dict(failures=["recompile: GPT.losses: reach"]),
    "host wait": dict(host_waits=dict.fromkeys(command.ALLOWED_WAITS, 3) |
                      {"Log.flush: line.losses.sum().item()": 2})}

@pytest.mark.parametrize("kind", FORBIDDEN)
def test_find_failures__update_does_not_accept_them(run_dry_run, tmp_path, kind) -> None:
    before = (tmp_path / "expected_costs.json").read_text()
    for flag in ("--gpus=8,1", "--update"):
        status, output = run_dry_run(make_walk(**FORBIDDEN[kind]), flag)
        assert status == 1 and output.count("FAILED") == 2
        assert all(f"FAILED  W = {world_size}: {kind}: " in output for world_size in "81")
    assert (tmp_path / "expected_costs.json").read_text() == before

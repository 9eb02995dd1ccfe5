"""Results on a GPU:  python -m pytest -m "gpu or gpus2" -s tests/gpu

The same tests run at small sizes on a CPU; -s prints the errors. Step `stages` of day.py checks recompiles and memory.
"""
import functools
import subprocess
import sys
from dataclasses import replace

import gpu_cases
import pytest
import torch
from common import (PROCESS_TIMEOUT_S, ROOT, fill_randomly, grad_of, planned, preset, random_batch, random_stream,
                    started_loader, write_shard)
from day import events_of
from fault_injection import Job
from forked_ranks import COMM_TIMEOUT, Rank
from gpu_cases import BF16, CASES, F32, F64, PLAIN, TRAINER, relative
from torch import Tensor

import train_gpt as tg


# ---- Several GPUs, or gloo on the CPU. First, because ranks are forks of this process, which has not opened a GPU yet.
TOKENS = 20_000
VOCAB_AND_BOS = 512, 0                   # vocabulary size, BOS id

def devices() -> list:
    """Return devices with numbers of ranks: two on the CPU, a second check; as many as there are GPUs."""
    params = [pytest.param("cpu", 2, marks=pytest.mark.slow)]
    num_gpus = torch.cuda.device_count()
    for world in (2, 4, 8):
        reason = f"{num_gpus} CUDA devices, {world} needed: not tested on several GPUs"
        if world <= max(num_gpus, 2):
            marks = [pytest.mark.gpus2, pytest.mark.skipif(num_gpus < world, reason=reason)]
            params.append(pytest.param("cuda", world, marks=marks))
    return params

def losses_of_steps(rank: Rank, device: str) -> list[float]:
    """Return the losses of all ranks together through all stages. With even tokens, half of the ranks own no row."""
    shard = write_shard(rank.folder / f"{rank.rank}.bin", 2 * random_stream(0, TOKENS, 256, 0), *VOCAB_AND_BOS)
    comm = rank.comm(tg.Config(device=device, seqs_per_step=rank.world, comm_timeout=COMM_TIMEOUT))
    cfg = preset("tiny", *VOCAB_AND_BOS, device=device, compile=0, train_files=str(shard))
    engine = tg.Engine(cfg, comm, tg.attention_reference, "plain")
    losses = []
    with started_loader(cfg, comm, tg.Schedule(cfg).end_step) as (loader, steps):
        for step_cfg in steps:
            step_loss = tg.train_step(engine, loader, step_cfg)
            losses.append(sum(comm.all_gather(float(step_loss.seq_sums.sum()))))
    return losses

@pytest.mark.parametrize("device, world", devices())
def test_train_step__ranks_have_the_losses_of_one(ranks, device, world) -> None:
    (expected,) = ranks(1, losses_of_steps, device="cpu")
    for found in ranks(world, losses_of_steps, device=device):
        assert found == pytest.approx(expected, rel=1e-4)

@pytest.mark.parametrize("device, world", devices())
@pytest.mark.parametrize("fault", ["kill in forward", "kill in a reduction", "sleep in forward"])     # in rank 1
def test_main__a_lost_rank_ends_all(tmp_path, fault, device, world) -> None:
    ended = Job(tmp_path / "job", f"--device={device}", "--compile=0", "--comm_timeout=20", world=world,
                faults={1: fault}).wait()
    text = "\n".join(ended.err)
    print(f"\nstatus {ended.status}\n{text}")
    assert None not in ended.status, "a rank hangs"
    assert all(ended.status)
    assert "lost another rank" in text


# ---- One device
CUDA = pytest.param("cuda", marks=[
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device: not tested on a GPU")])

@functools.cache
def lab_of(device: str) -> gpu_cases.Lab:
    comm = tg.Communicator(torch.device(device, 0))
    comm.set_thread_device()
    seed = 0
    if comm.on_cuda:
        seed = torch.seed() % 2**31                           # new inputs every time, with the seed printed
        print(f"inputs of seed {seed}")
    return gpu_cases.Lab(comm, seed=seed)

@pytest.fixture(params=["cpu", CUDA])
def lab(request: pytest.FixtureRequest) -> gpu_cases.Lab:
    return lab_of(request.param)

RAGGED = [("mlp", dict(T=1, F=8, D=8)), ("mlp", dict(T=130, F=264, D=72)), ("mlp", dict(T=1000, F=3072, D=768)),
          ("sums of rows", dict(R=40_000, T=98_304, D=96)), ("sums of rows", dict(R=7, T=1000, D=768)),
          ("sums of rows", dict(R=5, T=33, D=5))]

OF_THE_RECIPE = [name for name in CASES if name.startswith("NorMuon")]        # a fork may have another update rule

@pytest.mark.parametrize("name, sizes", [
    *(pytest.param(name, {}, marks=pytest.mark.recipe if name in OF_THE_RECIPE else ()) for name in CASES), *RAGGED])
def test_check__every_operation_against_f64(lab, name, sizes) -> None:
    """At the sizes of the device, and at ragged sizes: partial tiles, many positions of one row, equal bits again."""
    if name not in lab.cases():
        pytest.skip("not on this device: no fp8 matmul, or too little memory")
    if sizes:
        if not lab.comm.on_cuda:
            sizes = {letter: min(size, 400) for letter, size in sizes.items()}
        lab = gpu_cases.Lab(lab.comm, gpu_cases.TINY._replace(**sizes))
    case = CASES[name](lab)
    found = gpu_cases.check(name, case, lab)
    print(found)
    assert found["wrong"] == []
    if sizes:
        way = next(iter(case.ways.values()))
        first, again = (way(*(x.clone() for x in case.inputs)) for _ in range(2))
        assert all(x.equal(y) for x, y in zip(first, again))

# These gradients are sums over all positions, whose terms cancel.
SUM_GRADIENTS = ("scalars", "x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank")
MAX_ERRORS = {                           # relative errors of losses, gradients of matrices and SUM_GRADIENTS
    F32: (1e-6, 1e-5, 1e-5),             # about five times the errors on a CPU
    BF16: (1e-3, 0.1, 0.15)}
WEIGHT_SCALE = 0.25                      # larger weights amplify rounding errors

def gradients_of_step(cfg: tg.Config, comm: tg.Communicator, dtype: torch.dtype, tokens: int) -> dict[str, Tensor]:
    kernel = tg.attention_reference
    if dtype == BF16:
        kernel = gpu_cases.chosen_attention(comm, cfg.head_dim)
    cfg = replace(cfg, dtype=str(dtype).removeprefix("torch."), compile=int(comm.on_cuda and dtype == BF16))
    engine = tg.Engine(cfg, comm, kernel, "plain")
    fill_randomly(engine.model)
    with torch.no_grad():
        for p in engine.model.parameters():
            p.copy_(WEIGHT_SCALE * p.bfloat16())              # represented exactly, hence equal, in every dtype
    batch = planned(cfg, random_batch(cfg, 3, 2, tokens)).to(comm.device)
    losses = engine.forward_backward(batch, tg.Schedule(cfg).at(1)).seq_sums
    grads = {label: grad_of(engine.optimizer, label) for label, _ in engine.model.named_parameters()}
    return dict(grads, losses=losses)

def test_forward_backward__bf16_and_f32_against_f64(lab) -> None:
    """Full width with small tables; on a CPU all sizes are small."""
    cfg = preset("record", 4096, 4095, bigram_rows=8192, max_doc_len=256)
    tokens = 2048
    if not lab.comm.on_cuda:
        cfg = replace(cfg, bigram_rows=512, model_dim=64, num_heads=4, head_dim=16, attn_scale=0.8)
        tokens = 128
    exact = gradients_of_step(cfg, lab.comm, F64, tokens)
    for dtype, (max_loss_error, max_matrix_error, max_sum_error) in MAX_ERRORS.items():
        found = gradients_of_step(cfg, lab.comm, dtype, tokens)
        errors = {label: relative(x, exact[label]) for label, x in found.items()}
        print(dtype, errors)
        assert errors.pop("losses") < max_loss_error
        wrong = {}
        for label, error in errors.items():
            if not error < (max_sum_error if label in SUM_GRADIENTS else max_matrix_error):
                wrong[label] = error
        assert not wrong, dtype

@pytest.mark.parametrize("device", [CUDA])
def test_main__a_short_run_as_on_a_cpu(tmp_path, device) -> None:
    """Warm-up, training through all stages with an n-gram table, validation, checkpoints, sample."""
    losses = []
    for run in ("cpu", device):
        flags = [f"--device={run}", f"--run_dir={tmp_path}/{run}", "--preset=tiny", "--compile=0",
                 "--checkpoint_every=4", "--val_every=4", "--tables=[('trigram_embed', 3, 3001)]"]
        # No fork: this process has opened the GPU.
        subprocess.run([sys.executable, "train_gpt.py", *flags], cwd=ROOT, check=True, timeout=PROCESS_TIMEOUT_S)
        losses.append([event["val_loss"] for event in events_of(tmp_path / run, "val")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

def with_next_row(x: Tensor) -> Tensor:
    """Return a view with one more row, which belongs to other memory."""
    return torch.as_strided(x, (len(x) + 1, x.shape[1]), x.stride(), x.storage_offset())

def reads_after(sums: Tensor, index: Tensor, grad: Tensor) -> list[Tensor]:
    tg.add_rows(sums, index, grad)
    sums[0] += 0 * with_next_row(grad)[-1]                    # changes the sums only if that memory is not finite
    return [sums]

def writes_after(sums: Tensor, index: Tensor, grad: Tensor) -> list[Tensor]:
    tg.add_rows(sums, index, grad)
    with_next_row(sums)[-1] = 0.0
    return [sums]

def wider_window(*inputs: Tensor) -> list[Tensor]:
    lab = gpu_cases.Lab(lab_of("cpu").comm, gpu_cases.TINY._replace(short=gpu_cases.TINY.short + 1))
    return CASES["attention, short window"](lab).ways[PLAIN](*inputs)

@pytest.mark.parametrize("name, mistake, message", [
    ("sums of rows", reads_after, "output 0 is off by nan"),
    ("sums of rows", writes_after, "writes before an input or after it"),
    ("attention, short window", wider_window, "output 0 is off")])
def test_check__finds_a_planted_mistake(name, mistake, message) -> None:
    lab = lab_of("cpu")
    case = CASES[name](lab)._replace(ways={TRAINER: mistake})
    wrong = gpu_cases.check(name, case, lab)["wrong"]
    assert wrong and f"{name}, trainer: {message}" in wrong[0]

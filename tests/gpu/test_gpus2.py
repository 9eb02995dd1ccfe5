"""Tests that need several GPUs:  python -m pytest -m gpus2 -s tests/gpu

Training steps over NCCL; then ranks that die or stall. Without two GPUs, the same runs over gloo on the CPU.
"""
import pytest
import torch
from common import preset, random_stream, started_loader, write_shard
from fault_injection import Job
from forked_ranks import COMM_TIMEOUT, Rank

import train_gpt as tg

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
    """All ranks end in time with an error, and a surviving rank reports the loss."""
    ended = Job(tmp_path / "job", f"--device={device}", "--compile=0", "--comm_timeout=20", world=world,
                faults={1: fault}).wait()
    text = "\n".join(ended.err)
    print(f"\nstatus {ended.status}\n{text}")
    assert None not in ended.status, "a rank hangs"
    assert all(ended.status)
    assert "lost another rank" in text

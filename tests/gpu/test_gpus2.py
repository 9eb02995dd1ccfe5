"""What only several GPUs can show:  python -m pytest -m gpus2 -s tests/gpu

Rows there and back and whole runs, over NCCL; then ranks that die or stall. Without two GPUs the same runs over gloo on
the CPU; how ranks end there is what test_faults.py shows, and is tried here with --all.
"""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import owned, preset
from faults import TIMEOUT
from ranks import COMM_TIMEOUT, Rank

import train_gpt as tg

LIMIT = 2 * TIMEOUT + 40                 # s from the fault to the last end; NCCL's watchdog looks only now and then
WIDTH = 96
IDS = 64                                 # rows that a rank reads in a cycle


def on_devices(test):
    """On the CPU with two ranks; on as many GPUs as there are."""
    places = [("cpu", 2)]
    for world in (2, 4, 8):
        here = torch.cuda.device_count()
        if world > max(here, 2):
            break
        reason = f"{here} CUDA devices, {world} wanted: nothing of this is known here"
        marks = [pytest.mark.gpus2, pytest.mark.skipif(here < world, reason=reason)]
        places.append(pytest.param("cuda", world, marks=marks))
    return pytest.mark.parametrize("device, world", places)(test)


def fabric_of(rank: Rank, device: str) -> tg.Fabric:
    return rank.fabric(tg.Config(device=device, num_slots=rank.world, comm_timeout=COMM_TIMEOUT))


# ---- Rows
def ids_of(rank: int, cycle: int, rows: int) -> np.ndarray:
    """Rows that a rank reads in a cycle: many; all of one owner; the same one again and again on all ranks but 0."""
    if cycle == 1:
        return np.full((1, IDS), 2, np.int32)
    if cycle == 2 and rank > 0:
        return np.full((1, IDS), 5, np.int32)
    return np.random.default_rng([rank, cycle]).integers(0, rows, (1, IDS), dtype=np.int32)


def times_read(fabric: tg.Fabric, cycle: int, rows: int) -> torch.Tensor:
    """How often all ranks together read each row of this rank's slice, (C, WIDTH)."""
    reads = torch.zeros(fabric.world * -(-rows // fabric.world))
    for reader in range(fabric.world):
        ids = torch.from_numpy(ids_of(reader, cycle, rows))
        reads += torch.bincount(ids.flatten(), minlength=len(reads))
    return reads[fabric.rank::fabric.world][:, None].expand(-1, WIDTH)


def rows_there_and_back(rank: Rank, device: str) -> None:
    """Plans, the fetch of rows and the return of their gradients, against the whole table."""
    fabric = fabric_of(rank, device)
    cfg = preset("tiny", num_slots=fabric.world, device=device, num_heads=6, model_dim=WIDTH)
    table = tg.row_tables(cfg)[0]._replace(ids=np.asarray)                    # what it is asked for are rows
    whole = (torch.arange(table.rows) % 251.0)[:, None].expand(-1, WIDTH)     # rows can be told apart
    parameter = torch.nn.Parameter(owned(whole, fabric).to(fabric.device))
    rows = tg.RowTable(table, cfg, fabric, parameter, IDS, tg.no_wait)
    planner = tg.Planner(cfg, fabric)
    schedule = tg.Schedule(cfg)
    for cycle in range(4):
        ids = ids_of(fabric.rank, cycle, table.rows)
        batch = SimpleNamespace(tokens=ids, rows={})
        plan = planner.plan(table, "test", schedule.at(table.cadence * cycle), [batch])
        tg.exchange_plans(fabric, fabric.plan_group, cfg.dtype, {table.label: plan})
        cache, row_grads = rows.rows_for_forward(plan, rows.shard)
        place = torch.as_tensor(batch.rows[table.label]).long().to(fabric.device)
        assert cache.detach()[place].cpu().equal(whole[ids]), f"rows that arrived in cycle {cycle}"

        ones = torch.ones(IDS, WIDTH, device=fabric.device)
        row_grads.index_put_((place.flatten(),), ones, accumulate=True)
        grad, wait = rows.return_gradients()
        wait()
        assert grad.cpu().equal(times_read(fabric, cycle, table.rows)), f"gradients of cycle {cycle}"
        rows.clear()


@on_devices
def test_RowTable__rows_there_and_back(ranks, device, world):
    ranks(world, rows_there_and_back, device=device)


# ---- Steps
def losses_of_steps(rank: Rank, device: str) -> list[float]:
    """Of all ranks together, through all stages: rows, reductions, gathers in place, the untying."""
    fabric = fabric_of(rank, device)
    cfg = preset("tiny", device=device, compile=0)
    executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    schedule = tg.Schedule(cfg)
    steps = [schedule.at(step) for step in range(schedule.end_step)]
    cycles = [steps[first:first + schedule.cycle] for first in range(0, len(steps), schedule.cycle)]
    loader = tg.Loader(cfg, fabric, tg.find_shards(cfg.train_files), cycles, executor.exchange_ahead)
    loader.start()
    found = []
    for values in steps:
        losses = tg.train_step(executor, loader, values)
        found.append(sum(fabric.gather(float(losses.slot_sums.sum()))))
    loader.close()
    return found


@on_devices
def test_train_step__ranks_have_the_losses_of_one(ranks, device, world):
    (alone,) = ranks(1, losses_of_steps, device="cpu")
    for found in ranks(world, losses_of_steps, device=device):
        assert found == pytest.approx(alone, rel=1e-4)


# ---- Ranks that are lost
FAULTS = {                               # in rank 1: died; stalled beyond the timeout
    "a rank that dies": "kill in forward",
    "a rank that dies in a reduction": "kill in a reduction",
    "a rank that stalls": "sleep in forward",
}


@on_devices
@pytest.mark.parametrize("name", FAULTS)
def test_main__ranks_that_lose_one(request, launcher, tmp_path, name, device, world):
    """All ranks end in time and badly, and a survivor says that one was lost. As under torchrun, which ends the other
    ranks after the first that fails."""
    if device == "cpu" and not request.config.getoption("--all"):
        pytest.skip("a long loop: run with --all")
    ended = launcher.start(tmp_path / "job", f"--device={device}", "--compile=0", world=world, faults={1: FAULTS[name]},
                           ends=True).wait()
    text = "\n".join(ended.err)
    print(f"\nstatus {ended.status}, s to the end {ended.seconds}\n{text}")
    assert None not in ended.status, "a rank hangs"
    assert all(ended.status) and max(ended.seconds) < LIMIT
    assert "lost another rank" in text

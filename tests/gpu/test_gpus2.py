"""What only several GPUs can show:  python -m pytest -m gpus2 -s tests

Uneven and empty lists over NCCL, gathers in place, rows there and back; then ranks that die or stall. Without two GPUs
the collectives are rehearsed over gloo; how ranks end is what test_faults.py shows of a CPU, and is rehearsed by --all.
"""
import json
import subprocess
import sys

import pytest
import torch
from common import ROOT
from faults import TIMEOUT, Ended, Launcher
from gpu_ranks import CASES
from ranks import PATIENCE

GPUS = torch.cuda.device_count()
WORLDS = [world for world in (2, 4, 8) if world <= GPUS] or [2]
LIMIT = 2 * TIMEOUT + 40                 # s from the fault to the last end; NCCL's watchdog looks only now and then


def on_gpus(test):
    """Marked `gpus2`, and skipped where there are fewer than two."""
    skip = pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} CUDA devices, 2 wanted: nothing of this is known here")
    return pytest.mark.gpus2(skip(test))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """found(device, world): what each case found, by rank; started once for each."""
    kept = {}

    def of(device: str, world: int):
        if (device, world) not in kept:
            folder = tmp_path_factory.mktemp(f"{device}{world}")
            command = [sys.executable, str(ROOT / "tests/gpu/gpu_ranks.py"), str(folder), f"--device={device}",
                       f"--world={world}"]
            subprocess.run(command, timeout=PATIENCE * len(CASES), check=True)
            kept[device, world] = json.loads((folder / "found.json").read_text())
        return kept[device, world]

    return of


@on_gpus
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_collectives_of_gpus(found, case, world):
    assert found("cuda", world)[case] == [dict(wrong=[])] * world


@pytest.mark.parametrize("case", CASES)
def test_collectives_rehearsed(found, case):
    assert found("cpu", 2)[case] == [dict(wrong=[])] * 2


# ------ Ranks that are lost -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def own_launcher():
    server = Launcher()
    yield server
    server.close()


def check_loss(ended: Ended) -> None:
    """All ranks end in time and badly, and a survivor says that one was lost."""
    text = "\n".join(ended.err)
    print(f"\nstatus {ended.status}, s to the end {ended.seconds}\n{text}")
    assert None not in ended.status, "a rank hangs"
    assert all(ended.status) and max(ended.seconds) < LIMIT
    assert "lost another rank" in text


FAULTS = {                               # in rank 1: died; stalled beyond the timeout
    "a rank that dies": "kill in forward",
    "a rank that dies in a reduction": "kill in a reduction",
    "a rank that stalls": "sleep in forward",
}


def lose(launcher: Launcher, folder, device: str, fault: str) -> Ended:
    """As under torchrun, which ends the other ranks after the first that fails."""
    flags = [f"--device={device}", "--compile=0"]
    return launcher.start(folder, *flags, world=2, faults={1: fault}, ends=True).wait()


@on_gpus
@pytest.mark.parametrize("name", FAULTS)
def test_gpus_that_lose_a_rank(own_launcher, tmp_path, name):
    check_loss(lose(own_launcher, tmp_path / "job", "cuda", FAULTS[name]))


@pytest.mark.all
@pytest.mark.parametrize("name", FAULTS)
def test_lost_ranks_rehearsed(own_launcher, tmp_path, name):
    check_loss(lose(own_launcher, tmp_path / "job", "cpu", FAULTS[name]))

"""The device of a test of this folder: the CPU, where its lines run small, or a GPU, which is what they are for."""
import functools

import pytest
import torch

import train_gpt as tg

CUDA = pytest.param("cuda", marks=[
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device: nothing of this is known here")])

@functools.cache
def comm_of(device: str) -> tg.Communicator:
    comm = tg.Communicator(torch.device(device, 0))
    comm.set_thread_device()
    return comm

@pytest.fixture(params=["cpu", CUDA])
def comm(request: pytest.FixtureRequest) -> tg.Communicator:
    return comm_of(request.param)

@pytest.fixture(params=[CUDA])
def gpu(request: pytest.FixtureRequest) -> tg.Communicator:
    """For what only a GPU has."""
    return comm_of(request.param)

def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ranks are forks of this process, and want it before it opens a GPU."""
    items.sort(key=lambda item: item.get_closest_marker("gpus2") is None)

"""Fixtures for the device of a test in this folder: the CPU, at small sizes, or a GPU, which the tests are for."""
import functools

import pytest
import torch

import train_gpt as tg

CUDA = pytest.param("cuda", marks=[
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device: not tested on a GPU")])

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
    """A communicator on a GPU, for tests of what only a GPU has."""
    return comm_of(request.param)

def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with several ranks first: ranks are forks of this process and must be started before it opens a GPU."""
    items.sort(key=lambda item: item.get_closest_marker("gpus2") is None)

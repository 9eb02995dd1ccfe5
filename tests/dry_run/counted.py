"""Compare what a walk counts with independent counts. test_dry_run.py runs this in a separate process."""
from __future__ import annotations

from . import fake_cuda  # noqa: I001  before torch
import numpy as np
import torch

from .counts import TILE, Tally, executed_tiles

ROWS, WIDTH, INDEXED_ROWS = 100, 8, 5    # sizes of an f32 matrix; number of indices
MATRIX_BYTES = 4 * ROWS * WIDTH
INDEXED_BYTES = 8 * INDEXED_ROWS + 4 * INDEXED_ROWS * WIDTH   # indices (i64) and their rows (f32)
EXPECTED = {                             # operation -> bytes, flops
    "aten.mm": (MATRIX_BYTES + 4 * WIDTH * 3 + 4 * ROWS * 3, 2 * ROWS * WIDTH * 3), "aten.exp": (2 * MATRIX_BYTES, 0),
    "aten.zero_": (MATRIX_BYTES, 0),
    "aten.index_put_": (INDEXED_BYTES + 4 * INDEXED_ROWS * WIDTH, 0),
    "aten.index": (INDEXED_BYTES + 4 * INDEXED_ROWS * WIDTH, 0),
    "aten.copy_": (2 * 4 * INDEXED_ROWS * WIDTH, 0), "aten._to_copy": (MATRIX_BYTES + MATRIX_BYTES // 2, 0)}
WAITS = ["a number of the device", "copy from the device", "copy to the device",
         "copy to the device, of memory that is not pinned"]

def check_operations(tally: Tally) -> None:
    matrix = torch.empty(ROWS, WIDTH, device="cuda")
    rows = torch.empty(INDEXED_ROWS, WIDTH, device="cuda")
    index = torch.empty(INDEXED_ROWS, dtype=torch.int64, device="cuda")
    matrix @ torch.empty(WIDTH, 3, device="cuda")
    matrix.exp()
    matrix.zero_()
    matrix[index] = rows
    matrix[index]
    rows.copy_(matrix[:INDEXED_ROWS])
    matrix.bfloat16()
    found = {kernel["name"]: (kernel["bytes"], kernel.get("flops", 0)) for kernel in tally.kernels.values()}
    assert found == EXPECTED, found

def check_waits(tally: Tally) -> None:
    """The host waits for a scalar, for blocking copies, and for copies of pageable memory."""
    tally.begin("waits")
    on_device = torch.empty(4, device="cuda")
    on_device.sum().item()
    on_device.cpu()
    torch.empty(4).to("cuda")
    torch.empty(4).to("cuda", non_blocking=True)
    torch.empty(4).pin_memory().to("cuda", non_blocking=True)
    waits = [item[1].partition("# ")[2] for item in tally.phase.timeline if item[0] == "host_wait"]
    assert waits == WAITS, waits

def check_memory(tally: Tally) -> None:
    """At most two of three buffers are allocated at a time. A view prevents its buffer from being freed."""
    tally.begin("memory")
    before = tally.bytes_now
    first = torch.empty(1000, device="cuda")
    second = torch.empty(500, device="cuda")
    view = first[10:]
    del first
    assert tally.bytes_now == before + 6000
    del second, view
    third = torch.empty(100, device="cuda")
    assert tally.phase.peak_bytes == before + 6000 and tally.bytes_now == before + third.nbytes

def check_tiles() -> None:
    """Compare executed_tiles with an enumeration of all pairs of query and key."""
    lengths = np.concatenate([[1, 127, 128, 129, 256, 257], np.random.default_rng(0).integers(1, 700, 6)])
    for window in (1, 127, 128, 129, 300, 10**6):
        tiles = 0
        for length in lengths:
            query, key = np.arange(length)[:, None], np.arange(length)
            pairs = np.stack(np.nonzero((key <= query) & (key >= query - window))) // TILE
            tiles += len(np.unique(pairs, axis=1).T)
        assert executed_tiles(np.concatenate([[0], np.cumsum(lengths)]), window) == tiles, window


if __name__ == "__main__":
    tally = Tally(1)
    with fake_cuda.install("H100", tally):
        for check in (check_operations, check_waits, check_memory):
            check(tally)
    check_tiles()

"""What walk.py counts, against counts of another kind; for a process of its own:  python tests/walk_counts.py

Bytes, flops and waits of operations on a card that is not there; tiles of attention against all pairs of query and key;
which steps of a schedule stand for the others. test_rehearsal.py runs it.
"""
from __future__ import annotations

import threading
import types

import phantom  # noqa: I001  before torch
import walk
import numpy as np
import torch

import train_gpt as tg

ROWS, WIDTH = 100, 8
MATRIX = 4 * ROWS * WIDTH                # bytes in f32
LISTED = 5                               # rows of an index


def operations(mode: phantom.Card) -> None:
    """Each is launched once; EXPECTED says what of it."""
    with mode:
        matrix = torch.empty(ROWS, WIDTH, device="cuda")
        other = torch.empty(WIDTH, 3, device="cuda")
        few = torch.empty(LISTED, WIDTH, device="cuda")
        index = torch.empty(LISTED, dtype=torch.int64, device="cuda")
        matrix @ other
        matrix.exp()
        matrix.zero_()
        matrix.index_add_(0, index, few)
        matrix.index_copy_(0, index, few)
        matrix[index]
        few.copy_(matrix[:LISTED])
        matrix.bfloat16()


OF_LIST = 8 * LISTED + 4 * LISTED * WIDTH                                     # an index and its rows
EXPECTED = {                             # bytes, flops
    "aten.mm": (MATRIX + 4 * WIDTH * 3 + 4 * ROWS * 3, 2 * ROWS * WIDTH * 3),
    "aten.exp": (2 * MATRIX, 0),
    "aten.zero_": (MATRIX, 0),
    "aten.index_add_": (OF_LIST + 2 * 4 * LISTED * WIDTH, 0),                 # the target's rows are read, too
    "aten.index_copy_": (OF_LIST + 4 * LISTED * WIDTH, 0),
    "aten.index": (OF_LIST + 4 * LISTED * WIDTH, 0),
    "aten.copy_": (2 * 4 * LISTED * WIDTH, 0),
    "aten._to_copy": (MATRIX + MATRIX // 2, 0),
}


def check_operations(ledger: walk.Ledger, mode: phantom.Card) -> None:
    operations(mode)
    found = {}
    for kernel in ledger.kernels.values():
        found[kernel["name"]] = kernel["bytes"], kernel.get("flops", 0)
    assert found == EXPECTED, found
    counts = [item[2] for item in ledger.phase.timeline if item[0] == "run"]
    assert counts == len(EXPECTED) * [1], ledger.phase.timeline


def waits_of(ledger: walk.Ledger, mode: phantom.Card) -> list[str]:
    """What the host is said to wait for: a number, copies that are not told otherwise, and of pageable memory."""
    ledger.begin("waits")
    with mode:
        on_card = torch.empty(4, device="cuda")
        host = torch.empty(4)
        on_card.sum().item()
        on_card.cpu()
        host.to("cuda")
        host.to("cuda", non_blocking=True)
        host.pin_memory().to("cuda", non_blocking=True)
        on_card + 1
    return [item[1].partition("# ")[2] for item in ledger.phase.timeline if item[0] == "host_wait"]


def check_given_room(mode: phantom.Card) -> None:
    """A result may be written in fewer bits by what goes element by element, and not by a product."""
    with mode:
        matrix = torch.empty(WIDTH, WIDTH, device="cuda")
        room = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
        assert torch.mul(matrix, matrix, out=room) is room
        assert torch.mm(matrix, matrix, out=matrix) is matrix
        try:
            torch.mm(matrix, matrix, out=room)
        except AssertionError as error:
            assert "does not fit into" in str(error)
        else:
            raise AssertionError("a product of another dtype was taken")


def check_mover(ledger: walk.Ledger, mode: phantom.Card) -> None:
    """Work is done in its order, that of another thread when the walked one asks, and none is in the timeline."""
    ledger.begin("mover")
    done = []
    mover = walk.Mover()

    def work(number: int) -> int:
        torch.empty(4, device="cuda").cpu()
        done.append(number)
        return number

    with mode:
        mover.submit(work, 1)
        other = threading.Thread(target=mover.submit, args=(work, 2))
        other.start()
        other.join()
        assert done == [1]
        third = mover.submit(work, 3)
        assert done == [1, 2, 3] and third.result() == 3 and third.done()
    assert not ledger.phase.timeline
    assert sum(ledger.waits_elsewhere.values()) == 3 and not ledger.host_waits


def check_memory(ledger: walk.Ledger, mode: phantom.Card) -> None:
    """Two of three buffers live at once, and a view is none."""
    ledger.begin("memory")
    before = ledger.now
    with mode:
        first = torch.empty(1000, device="cuda")
        second = torch.empty(500, device="cuda")
        view = first[10:]
        del first
        assert ledger.now == before + 6000
        del second, view
        third = torch.empty(100, device="cuda")
    assert ledger.phase.peak == before + 6000 and ledger.now == before + third.nbytes
    assert sorted(buffer.size for buffer in ledger.phase.alive_at_peak())[-2:] == [2000, 4000]


def tiles_with_a_pair(lengths: np.ndarray, window: int) -> int:
    """Of all pairs of query and key, one by one: tiles that hold one that the mask leaves."""
    tiles = 0
    for length in lengths:
        query = np.arange(length)[:, None]
        key = np.arange(length)
        query, key = np.nonzero((key <= query) & (key >= query - window))
        pairs = np.stack([query, key]) // walk.TILE
        tiles += len(np.unique(pairs, axis=1).T)
    return tiles


def check_tiles() -> None:
    rng = np.random.default_rng(0)
    for window in (1, 127, 128, 129, 300, 10**6):
        lengths = np.concatenate([[1, 127, 128, 129, 256, 257], rng.integers(1, 700, 6)])
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        assert walk.executed_tiles(bounds, window) == tiles_with_a_pair(lengths, window), window


def check_names() -> None:
    """Each stage has an even and an odd step that stand for the others, away from the steps that change stages."""
    cfg = tg.Config(**tg.PRESETS["record"] | dict(num_scheduled_steps=3 * 6, num_extension_steps=6))
    schedule = tg.Schedule(cfg)
    steps = {}
    for step in range(24):
        name = walk.name_of_step(schedule, f"step {step}")
        if name:
            steps.setdefault(name, []).append(step)
    assert steps.pop("untie step") == [schedule.untie_step]
    assert sorted(steps) == [f"stage {number} {parity} step" for number in range(1, 5) for parity in ("even", "odd")]
    for name, (step,) in steps.items():
        stage = int(name.split()[1]) - 1
        assert step % 2 == ("odd" in name)
        assert schedule.starts[stage] + 2 <= step < schedule.ends[stage], name


def launcher(block: int, spills: int) -> types.SimpleNamespace:
    """As Inductor keeps one of a compiled configuration."""
    config = types.SimpleNamespace(kwargs=dict(XBLOCK=block), num_warps=4)
    return types.SimpleNamespace(config=config, n_regs=32, n_spills=spills, shared=0)


def check_configurations(ledger: walk.Ledger) -> None:
    """Those that are compiled and not launched stand beside the one that is."""
    compiled = [launcher(1, 0), launcher(64, 16)]
    owner = types.SimpleNamespace(inductor_meta=dict(kernel_name="triton_poi_7", kernel_num_gb=1e-6),
                                  all_launchers=compiled, launchers=compiled[:1],
                                  fn=types.SimpleNamespace(src="def triton_poi_7(): pass"))
    # Of 1,000 bytes that Inductor counts: more than it can move, unless it changes the larger argument in place.
    for names, size in ((["in_ptr0", "out_ptr0", "xnumel"], 960), (["in_out_ptr0", "in_ptr0", "xnumel"], 1000)):
        owner.fn.arg_names = names
        facts = dict(loops=[])
        ledger.generated(owner, facts, [torch.empty(200), torch.empty(40)])
        assert facts["bytes"] == size and facts["block"] == dict(XBLOCK=1)
    assert facts["others"] == [dict(block=dict(XBLOCK=64), warps=4, registers=32, spills=16, shared=0)]


def check_text() -> None:
    """Documents are cut as the share says; a shard has as many tokens as were asked for."""
    tokens = walk.english_like(200_000, 1)
    assert len(tokens) == 200_000 and tokens.max() == tg.GPT2_DOCUMENT_START
    starts = np.flatnonzero(tokens == tg.GPT2_DOCUMENT_START)
    lengths = np.diff(starts)
    for cut in (24, 256, 2048):
        share = np.minimum(lengths, cut).sum() / lengths.sum()
        assert abs(walk.kept_share(cut) / share - 1) < 0.2, cut


def main() -> None:
    ledger = walk.Ledger(1)
    mode = phantom.install("H100", ledger)
    check_operations(ledger, mode)
    waits = waits_of(ledger, mode)
    assert waits == ["a number of the device", "copy from the device", "copy to the device",
                     "copy to the device, of memory that is not pinned"], waits
    check_given_room(mode)
    check_mover(ledger, mode)
    check_memory(ledger, mode)
    check_tiles()
    check_names()
    check_configurations(ledger)
    check_text()


if __name__ == "__main__":
    main()

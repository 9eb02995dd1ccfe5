"""Prices: small timelines compared with times computed by hand, and the cost of a change."""
import itertools
from collections import Counter

import numpy as np
import pytest

from dry_run import command, price

# Round rates: a GPU with 100 TFLOP/s and 1 TB/s that launches a kernel in 3 us, and links of 100 GB/s with a latency of
# 20 us.
ROUND_RATES = dict(bfloat16=100e12, float8=200e12, memory=1e12, transposing=0.5e12, FA2=50e12, FA3=100e12,
                   special=1e12, issue=1e11, link=100e9, host_link=10e9)
FIXED = dict(launch_floor=3e-6, link_latency=20e-6, slack=1.25, fused_pass=0.5)
RATES = dict(fixed={name: dict(value=value) for name, value in FIXED.items()},
             cards=dict(round=dict(rates={kind: dict(peak=2 * rate, share=0.5) for kind, rate in ROUND_RATES.items()})))
PRODUCT = dict(kind="product", name="aten.mm", dtype="bfloat16", bytes=1.0, flops=1e12, m=1024, n=64, k=64, batch=1)
# A million programs of 4 warps. The code has 100 instructions, of which two loops repeat 30 and 10: see LOOPS.
THREADS = dict(kind="generated", name="triton_red_fused", bytes=1e9, instructions=100, warps=4, programs=10**6)
LOOPS = [dict(instructions=30, special=2, trips=50), dict(instructions=10, special=0, trips=5)]
KERNELS = dict(
    move=dict(kind="generated", name="triton_poi_fused_add", bytes=1e9),
    eager=dict(kind="eager", name="aten.index_put_", bytes=1e9),
    tiny=dict(kind="generated", name="triton_poi_fused_add", bytes=1e6),
    turn=dict(kind="generated", name="triton_poi_fused_t", bytes=1e9, block=dict(XBLOCK=32, YBLOCK=32)),
    think=dict(THREADS, special=40, loops=[]),
    loop=dict(THREADS, special=2, loops=LOOPS),
    mm=PRODUCT, bytes_mm=dict(PRODUCT, bytes=20e9), fused_mm=dict(PRODUCT, fused_bytes=20e9),
    scaled_mm=dict(PRODUCT, dtype="float8_e4m3fn", name="aten._scaled_mm"),
    flash=dict(kind="attention", name="attention_forward", bytes=1.0, flops=1e12),
    upload=dict(kind="copy", name="aten._to_copy", bytes=1e8))
COUNTS = {"stage 1": dict(even=8, odd=7), "stage 2": dict(even=7, odd=8)}
MS_PER_GB = 1000 * 7 / 8 / 100           # each of 8 GPUs sends 7/8 of a gigabyte, at 100 GB/s

CARD = price.Card(RATES, "round")

def make_walk(**timelines: list) -> dict:
    """Build a walk of one of eight GPUs. timelines: of phases like even_1, the even step of stage 1."""
    phases = {}
    for name, timeline in timelines.items():
        parity, stage = name.split("_")
        phases[f"stage {stage} {parity} step"] = dict(timeline=timeline, peak_bytes=0)
    return dict(kernels=KERNELS, phases=phases, graphs={}, host_waits={}, failures=[])

def price_even_step(**timelines: list) -> Counter:
    return price.price_phases(make_walk(**timelines), "8", CARD, "FA2")["stage 1 even step"]

def launch(kernel: str, count: int = 1) -> list:
    return ["run", kernel, count]

def collective(label: int, gigabytes: float, name: str = "all_gather_into_tensor") -> list:
    return ["collective", label, name, gigabytes * 1e9, "bfloat16"]

ONE_KERNEL = [                           # kernel, part, ms
    ("move", "memory-bound kernels", 1.25), ("eager", "memory-bound kernels", 1.25),
    ("turn", "memory-bound kernels", 2 * 1.25), ("upload", "memory-bound kernels", 10 * 1.25),
    ("mm", "products", 10 * 1.25), ("bytes_mm", "products", 20 * 1.25), ("scaled_mm", "products", 5 * 1.25),
    ("fused_mm", "products", 20 * 1.25),                      # 10 ms, and half of the 20 ms of a separate pass
    ("flash", "attention", 20 * 1.25),
    # 4e6 warps: of `think`, 40 special functions in each of 32 threads, at 10^12 per second; of `loop`, the
    # instructions, at 10^11 per second
    ("think", "memory-bound kernels", 4e6 * 40 * 32 / 1e9 * 1.25),
    ("loop", "memory-bound kernels", 4e6 * (100 + 30 * 49 + 10 * 4) / 1e8 * 1.25)]

@pytest.mark.parametrize("kernel, part, ms", ONE_KERNEL)
def test_resource_seconds__the_largest_counts(kernel, part, ms) -> None:
    found = price_even_step(even_1=[launch(kernel)])
    assert sum(found.values()) == found[part] == pytest.approx(ms)

STEPS = [                                # even step, odd step, ms of the even step, its parts
    # Two kernels of 1 us (1.25 us with slack): the floor of 3 us adds 1.75 us twice.
    ([launch("tiny", 2), launch("move")], [], 1.256, dict(launches=0.0035)),
    # The collective starts at 1.25 ms and takes 0.02 + 8.75 ms, while kernels take 5 ms.
    ([launch("move"), collective(1, 1.0), launch("move", 4), ["wait", 1], launch("move")], [], 7.5 + 3.77, {}),
    ([collective(1, 0.1), launch("move"), ["wait", 1]], [], 1.25, {}),
    # The step waits for the second collective before it waits for the first. Collectives run one after another.
    ([collective(1, 1.0), collective(2, 1.0), ["wait", 2], ["wait", 1]], [], 2 * (0.02 + MS_PER_GB), {}),
    ([collective(1, 1.0, "all_reduce"), ["wait", 1]], [], 0.02 + 2 * MS_PER_GB, {}),
    # The odd step launches a collective of 8.77 ms and ends 1.25 ms later. The even step waits for the rest.
    ([["wait", "before 9"], launch("move")], [collective(9, 1.0), launch("move")], 1.25 + 0.02 + MS_PER_GB - 1.25, {})]

@pytest.mark.parametrize("even, odd, ms, parts", STEPS)
def test_Streams__steps_computed_by_hand(even, odd, ms, parts) -> None:
    found = price_even_step(even_1=even, odd_1=odd)
    assert sum(found.values()) == pytest.approx(ms)
    assert found | parts == pytest.approx(found)

def costs_of(**timelines: list) -> dict:
    world = command.summarize(make_walk(**timelines), "8", CARD)
    return dict(card="round", attention=CARD.attention, steps=COUNTS, worlds={"8": world})

def test_format_difference__by_stage_where_both_have_it() -> None:
    """A kernel that transposes 1 GB is added to the even steps of stage 1, which are 8 of its 15 steps."""
    odd = [launch("move", 2)]
    was = costs_of(even_1=[launch("move")], odd_1=odd, even_2=[launch("move", 3)])
    now = costs_of(even_1=[launch("move"), launch("turn")], odd_1=odd)
    by_hand = (8 * 1 + 7 * 2 + 7 * 3) * 1.25 / 1000
    assert price.stage_times(was, "8", "FA2", ["stage 1", "stage 2"])[-1] == pytest.approx(by_hand)
    assert f"| FA3, mean step             | {22 / 15 * 1.25:.2f}    | 3.75    | 0.05 " in price.format_prediction(was)
    page = price.format_difference(was, now)
    assert f"| FA2, more        | {8 / 15 * 2.5:+.2f}   | +0.02 " in page and "stage 2" not in page

def test_executed_tiles__as_an_enumeration_of_query_and_key() -> None:
    lengths = np.concatenate([[1, 127, 128, 129, 256, 257], np.random.default_rng(0).integers(1, 500, 2)])
    for window in (1, 127, 128, 129, 300, 10**6):
        tiles = 0
        for length in lengths:
            query, key = np.arange(length)[:, None], np.arange(length)
            pairs = np.stack(np.nonzero((key <= query) & (key >= query - window))) // price.TILE
            tiles += len(np.unique(pairs, axis=1).T)
        assert price.executed_tiles([0, *itertools.accumulate(lengths)], window) == tiles, window

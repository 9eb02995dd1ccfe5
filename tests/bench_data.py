"""Time of packing and hashing per step: python tests/bench_data.py ['../shared/data/measure_train_*.bin']

Prints, for the three batch sizes of the record preset, the median over steps of what the loader thread does for a rank
that has one slot of eight (8 ranks) and for one that has all eight (1 rank). It runs beside training, not in it: one
cycle of two steps is made while the one before trains. Without shards the tokens come from a formula.
"""
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as t

STEPS = 30


def milliseconds(cfg: t.Config, headers: list[t.ShardHeader], values: t.Values, world: int) -> tuple[float, float]:
    """Medians over STEPS steps of (packing and copying, bigram hash) on rank 0 of `world`."""
    loader = t.Loader(cfg, t.Fabric(torch.device("cpu"), 0, world), headers, [values])
    loader.upcoming = next(loader.shards)
    totals, hashes = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        batch = loader._make(values)
        totals.append(time.perf_counter() - began)
        began = time.perf_counter()
        t.bigram_hash(batch.tokens.numpy(), cfg.bigram_rows)
        hashes.append(time.perf_counter() - began)
    loader.close()
    total, hashed = statistics.median(totals), statistics.median(hashes)
    return 1000 * (total - hashed), 1000 * hashed


def main() -> None:
    pattern = sys.argv[1] if len(sys.argv) > 1 else "../shared/data/measure_train_*.bin"
    if not list(Path().glob(pattern)):
        print(f"no file matches {pattern}: tokens from a formula, in short documents")
        pattern = "formula:50257:50256:9000000:2"
    headers = t.find_shards(pattern)
    cfg = t.resolve(t.Config(epochs=0), headers, headers)
    schedule = t.Schedule(cfg)
    print(f"{pattern}, {STEPS} steps, medians in ms per step")
    print("ranks  tokens per rank  packing    hash   total")
    for world in (8, 1):
        for start in schedule.stage_starts[:3]:
            values = schedule.at(start)
            packing, hashed = milliseconds(cfg, headers, values, world)
            tokens = values.slot_tokens * cfg.num_slots // world
            print(f"{world:5}  {tokens:15,}  {packing:7.3f} {hashed:7.3f} {packing + hashed:7.3f}")


if __name__ == "__main__":
    main()

"""Time of packing, hashing and row plans per cycle: python tests/bench_data.py ['../shared/data/measure_train_*.bin']

Prints, for the three batch sizes of the record preset, the median over cycles of what the loader thread does for a rank
that has one slot of eight (8 ranks) and for one that has all eight (1 rank): packing and copying, the bigram hash, the
plans of the three tables without it, and all of it. The exchange of the plans is not in it. It runs beside training,
not in it: one cycle of two steps is made while the one before trains. Without shards the tokens come from a formula.
"""
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as t

PLANS = "bigram_embed", "value_embed", "embed"
CYCLES = 30


def milliseconds(cfg: t.Config, headers: list[t.ShardHeader], values: t.Values, world: int) -> dict[str, float]:
    """Medians over CYCLES cycles on rank 0 of `world`."""
    loader = t.Loader(cfg, t.Fabric(torch.device("cpu"), 0, world), headers, [values])
    loader.upcoming = next(loader.shards)
    found: dict[str, list[float]] = {name: [] for name in ("packing", "hash", *PLANS, "total")}
    for _ in range(CYCLES):
        began = time.perf_counter()
        batches = loader._make([values] * t.CYCLE)
        found["total"].append(1000 * (time.perf_counter() - began))
        began = time.perf_counter()
        for batch in batches:
            t.bigram_hash(batch.tokens.numpy(), cfg.bigram_rows)
        found["hash"].append(1000 * (time.perf_counter() - began))
        for label in PLANS:
            found[label].append(batches[0].plans[label].plan_ms)
        found["packing"].append(found["total"][-1] - found["hash"][-1] - sum(found[label][-1] for label in PLANS))
    loader.close()
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    pattern = sys.argv[1] if len(sys.argv) > 1 else "../shared/data/measure_train_*.bin"
    if not list(Path().glob(pattern)):
        print(f"no file matches {pattern}: tokens from a formula, in short documents")
        pattern = "formula:50257:50256:9000000:2"
    headers = t.find_shards(pattern)
    cfg = t.resolve(t.Config(epochs=0), headers, headers)
    schedule = t.Schedule(cfg)
    print(f"{pattern}, {CYCLES} cycles, medians in ms per cycle; names of tables: their plans")
    print("ranks  tokens per rank  " + "  ".join(("packing", "hash", *PLANS, "total")))
    for world in (8, 1):
        for start in schedule.stage_starts[:3]:
            values = schedule.at(start)
            found = milliseconds(cfg, headers, values, world)
            tokens = t.CYCLE * values.slot_tokens * cfg.num_slots // world
            print(f"{world:5}  {tokens:15,}  " + "  ".join(f"{ms:{len(name)}.3f}" for name, ms in found.items()))


if __name__ == "__main__":
    main()

"""Row statistics of real tokens at recipe A's sizes and 8 ranks: what travels in mode sparse, and who is busy."""
import glob

import pytest

import bench_rows

CYCLES = 8
LIMITS = dict(bigram_embed=(0.09, 0.16, 0.22), value_embed=(0.15, 0.23, 0.29))       # of the bytes of dense, by stage
SCATTER = dict(bigram_embed=(0.55, 0.59, 0.62), value_embed=(0.58, 0.62, 0.65))
BUSIEST_OWNER = 1.1                                                                  # over the mean owner


@pytest.mark.skipif(not glob.glob("../shared/data/measure_train_*.bin"), reason="needs real tokens, ../shared/data")
@pytest.mark.parametrize("stage", bench_rows.STAGES)
def test_sparse_moves_a_small_part_of_the_bytes_and_owners_share_the_work(stage):
    rows = bench_rows.table_rows()
    for label, counts in bench_rows.counted(stage, CYCLES).items():
        found = bench_rows.shares(counts, rows[label])
        assert counts.shape == (CYCLES, bench_rows.RANKS, bench_rows.RANKS)
        assert found["busiest"] < BUSIEST_OWNER, label
        if label in LIMITS:
            assert found["sparse"] < LIMITS[label][stage] and found["sparse_scatter"] < SCATTER[label][stage], label
            assert found["sparse"] + 0.5 > found["sparse_scatter"] > 0.5 > found["sparse"] > 0.05, label

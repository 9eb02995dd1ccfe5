"""Row statistics of real tokens at recipe A's sizes and 8 ranks: what travels, and who is busy."""
import glob

import pytest

import bench_rows
import bench_tables

CYCLES = 8
LIMITS = dict(bigram_embed=(0.09, 0.16, 0.22), value_embed=(0.15, 0.23, 0.29))       # of the bytes of dense, by stage
BUSIEST_OWNER = 1.1                                                                  # over the mean owner


real_tokens = pytest.mark.skipif(
    not glob.glob("../shared/data/measure_train_*.bin"), reason="needs real tokens, ../shared/data")


@pytest.mark.recipe
@real_tokens
@pytest.mark.parametrize("stage", bench_rows.STAGES)
def test_sparse_moves_a_small_part_of_the_bytes_and_owners_share_the_work(stage):
    rows = bench_rows.table_rows()
    for label, counts in bench_rows.counted(stage, CYCLES).items():
        found = bench_rows.shares(counts, rows[label])
        assert counts.shape == (CYCLES, bench_rows.RANKS, bench_rows.RANKS)
        assert found["busiest"] < BUSIEST_OWNER, label
        if label in LIMITS:
            assert 0.05 < found["sparse"] < LIMITS[label][stage], label


@real_tokens
def test_large_tables_are_asked_for_as_many_rows_as_before(monkeypatch):
    """Two cycles of the first stage against an earlier count, and bytes that do not know how large a table is."""
    monkeypatch.setattr(bench_tables, "CYCLES", 2)
    plans = list(bench_tables.plans_by_rank(0))
    bigrams, trigrams = [bench_tables.channel(plans, label) for label in bench_tables.CHANNELS]
    of_a_rank, of_all = bench_tables.EARLIER[0]
    assert bigrams.rank_rows + trigrams.rank_rows == pytest.approx(of_a_rank, rel=0.05)
    assert bigrams.all_rows + trigrams.all_rows == pytest.approx(of_all, rel=0.05)
    assert 0.1 < bigrams.kept < 0.4 and 0.03 < trigrams.kept < 0.2
    for found in (bigrams, trigrams):
        sent = found.rank_rows * 7 / 8 * (2 * 1536 + 4)
        assert found.megabytes == pytest.approx(1e-6 * sent, rel=0.02)

"""`show` and `place`: numbers against numpy and scipy, planted outliers and drifts, runs that leave a band."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from planted import A_LOSSES, A_TIMES, LOSS, LOSS_SD, NOON, RUN_S, SECONDS, TIME_SD, pool, write
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "records" / "golden"
sys.path.insert(0, str(ROOT / "records"))
from tools import logs, sides, verdict
from tools import pool as pools
from tools.logs import ToolError


def side(*paths: Path, **choice) -> sides.Side:
    return sides.side_of("pool", list(paths), sides.Choice(**choice))


def drawn(folder: Path, runs: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    pool(folder, "a", rng.normal(LOSS, LOSS_SD, runs), rng.normal(SECONDS, TIME_SD, runs), apart=RUN_S)


# ---- show -----------------------------------------------------------------------------------------------------------

def test_numbers_of_a_pool(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    found = pools.show(side(tmp_path), 3.28)
    assert found["loss"] == (5, pytest.approx(np.mean(A_LOSSES)), pytest.approx(np.std(A_LOSSES, ddof=1)))
    p = stats.ttest_1samp(A_LOSSES, 3.28, alternative="less").pvalue
    assert found["p_target"] == pytest.approx(p) and found["verdict"] == "proven"
    half = stats.t.isf(0.005, 4) * np.std(A_TIMES, ddof=1) * np.sqrt(1.2)
    assert found["time_band"] == pytest.approx((80 - half, 80 + half))
    slope = stats.linregress(range(5), A_TIMES)
    assert found["drift"] == {"share": pytest.approx(slope.slope / 80), "p": pytest.approx(slope.pvalue)}
    assert [point["step"] for point in found["proven_at"]] == [1000]
    assert found["kinds"] == [{"source": "55555555", "end": 1000, "planned": 1000, "runs": 5}]


@pytest.mark.parametrize("above, word", [(0.0, "proven"), (0.0012, "undecided"), (0.002, "no record")])
def test_the_word_on_a_pool(tmp_path, above, word):
    pool(tmp_path, "a", [loss + above for loss in A_LOSSES], A_TIMES)
    found = pools.show(side(tmp_path), 3.28)
    assert found["verdict"] == word and (found["runs_for_target"] is None) == (word == "no record")


def test_a_mixed_pool_is_said_and_can_be_chosen_from(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    write(tmp_path / "a" / "other", 9, 85.0, LOSS, NOON, steps=1200, source_sha256="7" * 64)
    found = pools.show(side(tmp_path), 3.28)
    assert found["verdict"] == "not comparable" and len(found["kinds"]) == 2
    assert pools.show(side(tmp_path, steps=1000), 3.28)["verdict"] == "proven"
    write(tmp_path / "a" / "one_gpu", 10, 600.0, LOSS, NOON, world_size=1)
    found = pools.show(side(tmp_path, source="5"), 3.28)
    assert found["verdict"] == "not comparable" and "mixes world_size: 1 and 8" in found["reason"]
    write(tmp_path / "b" / "one", 10, 600.0, LOSS, NOON)
    assert "pool mixes world_size: 1 and 8; choose with --exclude" in pools.place(
        pools.run_of(tmp_path / "b"), side(tmp_path / "a", source="5"))["notes"]
    (tmp_path / "a" / "one_gpu" / "log.jsonl").unlink()
    assert pools.show(side(tmp_path, source="5"), 3.28)["verdict"] == "proven"


def test_outliers_and_drift_are_named(tmp_path):
    drawn(tmp_path / "quiet", 12)
    found = pools.show(side(tmp_path / "quiet"))
    assert found["outliers"] == [] and found["drift"]["p"] > 0.01 and found["verdict"] == "no target"

    rng = np.random.default_rng(1)
    times = [SECONDS * (1 + 0.0005 * k) + rng.normal(0, TIME_SD) for k in range(12)]
    pool(tmp_path / "drift", "a", rng.normal(LOSS, LOSS_SD, 12), times, apart=RUN_S)
    write(tmp_path / "drift" / "a" / "odd", 99, 80.2, LOSS + 10 * LOSS_SD, NOON + 12 * RUN_S)
    found = pools.show(side(tmp_path / "drift"))
    assert len(found["outliers"]) == 1 and "odd" in found["outliers"][0] and "loss" in found["outliers"][0]
    assert found["drift"]["p"] < 1e-3 and found["drift"]["share"] == pytest.approx(0.0005, rel=0.4)


def test_a_drift_over_days_is_not_judged(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES, apart=86_400)
    assert pools.show(side(tmp_path))["drift"] is None
    pool(tmp_path / "undated", "a", A_LOSSES, A_TIMES, hardware=None)
    assert pools.show(side(tmp_path / "undated"))["drift"] is None


def test_outliers_come_at_the_stated_rate():
    """Grubbs' test: in 1 % of normal samples, whatever their size; 3,000 draws and three standard errors."""
    rng = np.random.default_rng(5)
    found = [bool(verdict.outliers(list(rng.standard_normal(n)))) for n in (4, 8, 20) for _ in range(1000)]
    assert np.mean(found) <= 0.01 + 3 * np.sqrt(0.01 * 0.99 / 3000)
    assert np.mean(found) >= 0.01 - 4 * np.sqrt(0.01 * 0.99 / 3000)
    assert verdict.outliers([1.0, 1.1, 0.9, 1.05, 0.95, 3.0]) == [5]


# ---- place ----------------------------------------------------------------------------------------------------------

def one_run(folder: Path, seconds: float = SECONDS, loss: float = LOSS, **settings) -> logs.Run:
    return pools.run_of(write(folder, 77, seconds, loss, NOON + 9 * RUN_S, **settings))


def test_a_run_of_the_same_kind_is_inside(tmp_path):
    drawn(tmp_path, 10)
    found = pools.place(one_run(tmp_path / "one" / "a"), side(tmp_path / "a"))
    assert found["verdict"] == "inside" and found["environment"] == {}
    assert [point.step for point in found["losses"]] == [0, 900, 1000] == [point.step for point in found["times"]]


def test_runs_of_the_same_kind_leave_the_band_at_the_stated_rate():
    """Four correlated points, as of a curve: in at most 1 % of 2,000 draws."""
    rng = np.random.default_rng(3)
    outside = 0
    for _ in range(2000):
        curves = [dict(enumerate(rng.normal() + 0.3 * rng.standard_normal(4))) for _ in range(9)]
        outside += any(not point.inside for point in pools.judged(curves[0], curves[1:]))
    assert outside <= 2000 * 0.01 + 3 * np.sqrt(2000 * 0.01 * 0.99) and outside >= 2


def test_my_run_is_0_7_s_off(tmp_path):
    """Where time leaves the band, and between which points most of it is lost."""
    drawn(tmp_path, 10)
    found = pools.place(one_run(tmp_path / "one" / "a", SECONDS + 0.7), side(tmp_path / "a"))
    assert found["verdict"] == "outside" and "time leaves the band" in found["reason"]
    assert "loss" not in found["reason"]
    worst = max(found["lost"], key=lambda part: part["seconds"])
    assert (worst["from_step"], worst["to_step"]) == (0, 900)
    assert sum(part["seconds"] for part in found["lost"]) == pytest.approx(0.7, abs=0.1)


def test_a_worse_loss_is_found_at_its_first_validation(tmp_path):
    drawn(tmp_path, 10)
    found = pools.place(one_run(tmp_path / "one" / "a", loss=LOSS + 0.01, torch="2.14"), side(tmp_path / "a"))
    assert found["verdict"] == "outside" and "loss leaves the band at step 0;" in found["reason"]
    assert found["environment"] == {"torch": (["2.13.0"], ["2.14"])}
    assert "step 0" in pools.place_in_words(found) and "ABOVE" in pools.place_in_words(found)


def test_a_run_that_is_still_going(tmp_path):
    """Judged at what it has: a validation, and its last training line for the time."""
    drawn(tmp_path, 10)
    path = write(tmp_path / "one" / "a", 77, SECONDS + 0.7, LOSS, NOON)
    lines = path.read_text().splitlines()
    header, first = lines[0], lines[1]
    trained = [line for line in lines if '"step", "step"' in line]
    path.write_text("\n".join([header, first, *trained[:5]]) + "\n")
    found = pools.place(pools.run_of(path), side(tmp_path / "a"))
    assert [point.step for point in found["losses"]] == [0]
    assert [point.step for point in found["times"]] == [0, 500]
    assert not found["finished"] and "no result line and no cause" in found["notes"]


def test_what_cannot_be_judged(tmp_path):
    pool(tmp_path, "a", A_LOSSES[:2], A_TIMES[:2])
    found = pools.place(one_run(tmp_path / "one" / "a"), side(tmp_path / "a"))
    assert found["verdict"] == "undecided" and found["losses"] == []
    pool(tmp_path / "short", "a", A_LOSSES, A_TIMES)
    run = one_run(tmp_path / "long", steps=1200)
    notes = pools.place(run, side(tmp_path / "short"))["notes"]
    assert "the run is planned for 1200 steps, the pool for 1000" in notes[0]
    with pytest.raises(ToolError, match="nowhere"):
        pools.run_of(tmp_path / "nowhere")


@pytest.mark.parametrize("path", [path for path in GOLDEN.iterdir() if path.name not in ("z_no_logs", "reports")],
                         ids=str)
def test_every_family_can_be_shown_and_placed(path):
    shown = pools.show(side(path), 3.28)
    placed = pools.place(pools.run_of(path), side(GOLDEN / "g_trials.txt"))
    for found, words in ((shown, pools.show_in_words), (placed, pools.place_in_words)):
        json.dumps(pools.compare.jsonable(found), allow_nan=False)
        assert words(found).splitlines()[-1].startswith("verdict: ")


def test_the_commands(tmp_path, monkeypatch, capsys):
    """The exit status says the word; a run is not set beside itself."""
    monkeypatch.chdir(tmp_path)
    drawn(tmp_path, 10)
    assert pools.main_show(["a", "--target=3.28"]) == 0
    assert pools.main_show(["a", "--target=3.2"]) == verdict.STATUS["no record"]
    one_run(tmp_path / "one" / "a", SECONDS + 0.7)
    assert pools.main_place(["one", "a"]) == pools.OUTSIDE
    capsys.readouterr()
    assert pools.main_place(["a/run_3", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pool_runs"] == 9
    with pytest.raises(ToolError, match="only the run itself"):
        pools.main_place(["one", "one"])

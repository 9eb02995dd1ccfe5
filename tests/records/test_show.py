"""records/tools/show.py: a run in the band of a pool, and next to a record."""
import sys
from pathlib import Path

import pytest

from record_common import A_LOSSES, CPU, NOON, RUN_S, call, events_of, make_run, make_side, write_events

from tools import record, report, show, statistics                                # noqa: E402
from tools.read import read_runs                              # noqa: E402

def place(log: Path, pool: Path) -> dict:
    run, = read_runs([log]).runs
    return show.place(run, report.side_of("pool", [pool]))

@pytest.mark.parametrize("loss, word", [(3.2785, "inside"), (3.2900, "outside"), (3.2700, "outside")])
def test_place__the_last_point_decides(tmp_path, loss, word) -> None:
    pool = make_side(tmp_path / "pool")
    run = make_run(tmp_path / "run", 9, loss, 80.02, NOON + 9 * RUN_S)
    status, out, _ = call("show", run, "--against", pool)
    assert f"verdict: {word}: loss {loss:.4f} at step 10" in out and status == report.STATUS[word]
    found = place(run, pool)
    assert (found["low"], found["high"]) == statistics.band(A_LOSSES)

def test_place__during_a_run(tmp_path) -> None:
    pool = make_side(tmp_path / "pool")
    log = make_run(tmp_path / "run", 9, 3.2885, 82.0, NOON + 9 * RUN_S) / "log.jsonl"
    write_events(log, events_of(log)[:10])
    found = place(log, pool)
    assert found["step"] == 5 and found["verdict"] == "outside" and "running or killed" in found["notes"][-1]

def test_place__runs_of_the_same_program_if_there_are_any(tmp_path) -> None:
    """A record of a chain also contains runs of base and parent, which have other times."""
    pool = make_side(tmp_path / "pool/own")
    make_side(tmp_path / "pool/others", source="other = 1\n", times=[90.0] * 5)
    found = place(make_run(tmp_path / "run", 9, 3.2785, 80.02, NOON + 9 * RUN_S), pool.parent)
    assert found["verdict"] == "inside" and found["pool_runs"] == 5
    found = place(make_run(tmp_path / "stranger", 9, 3.2785, 80.02, source="x = 1\n"), pool.parent)
    assert found["verdict"] == "undecided" and "mixes source_sha256" in found["reason"]

def test_place__no_band_of_four_runs(tmp_path) -> None:
    pool = make_side(tmp_path / "pool", [3.278, 3.279, 3.277, 3.278], [80.0] * 4)
    found = place(make_run(tmp_path / "run", 9, 3.9, 80.02, NOON + 9 * RUN_S), pool)
    assert found["verdict"] == "undecided" and "at least 5 runs" in found["reason"]

@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records 01 with three seeds, and 02 with five seeds of other data."""
    place = tmp_path_factory.mktemp("records")
    root = place / "records"
    root.mkdir()
    for name, losses, data in (("Three", (2.171, 2.144, 2.162), "d"), ("Five", (2.17, 2.16, 2.15, 2.17, 2.16), "e")):
        for seed, loss in enumerate(losses):
            make_run(place / f"{name}/{seed}", seed, loss, 97.0 + seed, **CPU, data_sha256=64 * data)
        status, _, error = call("new", "--records", root, name, place / name, "--track=pocket", "--date=2026-01-01")
        assert status == 0, error
    return root

ALONE = "no record has this preset, these data and as many tokens\n"
OF_FIVE = dict(data_sha256="e" * 64)

@pytest.mark.parametrize("losses, facts, words", [
    ([2.21], dict(result={"unigram_nats": 2.5}), "unigram entropy 2.500, record 01 2.159 (2.144 to 2.171, 3 seeds)\n"),
    ([2.18, 2.19], OF_FIVE, "record 02 2.162 (2.150 to 2.170, 5 seeds)\n"),
    ([2.21], dict(data_sha256="f" * 64), ALONE), ([2.21], dict(config={"val_tokens": 131_072}), ALONE),
    ([2.21], dict(preset="pocket_tables"), ALONE), ([2.21], dict(result={"tokens": 1024}), ALONE)])
def test_entry_beside__the_latest_entry_of_the_data(root, tmp_path, monkeypatch, losses, facts, words) -> None:
    """--baselines does not import scipy."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr(record, "RECORDS", root)
    for seed, loss in enumerate(losses):
        make_run(tmp_path / f"runs/{seed}", seed, loss, 99.0, **CPU | facts)
    status, out, error = call("show", tmp_path / "runs", "--baselines", f"--plot={tmp_path}/x.svg")
    assert status == 0 and f"for comparison, nats per token: {words}" in out, out + error
    assert (tmp_path / "x.svg").exists() and "picture: " in error

def test_show__without_scipy_no_target_of_the_logs_is_tested(tmp_path, monkeypatch) -> None:
    """./run.sh calls `show --baselines` after several runs; its environment lacks scipy."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    pool = make_side(tmp_path / "pool", target_loss=3.28)
    status, out, error = call("show", pool, "--baselines")
    assert status == 0 and "verdict: no target: a test takes scipy" in out, out + error

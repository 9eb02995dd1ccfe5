"""`compare`: refusals, what is said, choices, bad input. Planted cases with known answers are in test_planted.py."""
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from planted import A_LOSSES, A_TIMES, B_LOSSES, B_TIMES, LOSS, NOON, RUN_S, peer, peers, pool, report, write

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "records" / "golden"
sys.path.insert(0, str(ROOT / "records"))
from tools import compare, logs, plots, sides, timing, verdict
from tools import pool as pool_of_runs
from tools.logs import ToolError


def test_numbers_of_a_report(tmp_path):
    """Against numpy, and by hand: slope 0.03 in 100 steps and 8 s, so a nat is 266.7 s."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES, target_loss=3.28)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, target_loss=3.28)
    found = report(tmp_path)
    assert found["verdict"] == "faster" and found["target"] == 3.28
    assert found["a"]["loss"] == (5, pytest.approx(np.mean(A_LOSSES)), pytest.approx(np.std(A_LOSSES, ddof=1)))
    apart = np.mean(B_TIMES) - np.mean(A_TIMES)
    assert found["b"]["time"] == (5, pytest.approx(np.mean(B_TIMES)), pytest.approx(np.std(B_TIMES, ddof=1)))
    assert found["time"].mean == pytest.approx(apart, abs=0.01) and found["time"].low < apart < found["time"].high
    assert found["nats_per_step"] == pytest.approx(0.0003) and found["s_per_nat"] == pytest.approx(8 / 0.03)
    nats = np.mean(B_LOSSES) - np.mean(A_LOSSES)
    assert found["equivalent_steps"] == pytest.approx(nats / 0.0003)
    priced = [test.mean for test in found["at_equal_loss"]]
    assert priced == pytest.approx([apart + nats * k * 8 / 0.03 for k in (1, 2)])
    assert found["memory"].mean == 0 and found["a"]["p_target"] == verdict.one_sample(A_LOSSES, 3.28)
    other = report(tmp_path, target=3.2)
    assert other["target"] == 3.2 and other["a"]["runs_for_target"] is None


def test_loss_decides_at_equal_loss(tmp_path):
    """B is 1 s faster but 0.02 nats worse, which is worth 5.3 s and more; and the other way round."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", [loss + 0.02 for loss in B_LOSSES], B_TIMES)
    found = report(tmp_path)
    assert found["verdict"] == "slower" and "at equal loss" in found["reason"] and found["time"].mean < 0
    assert found["parts_at"] == 0
    back = compare.compare(compare.side_of("A", [tmp_path / "b"]), compare.side_of("B", [tmp_path / "a"]))
    assert back["verdict"] == "faster"


def test_curves_part_where_they_part(tmp_path):
    """Equal at step 0 within the seeds, apart from step 900 on; equal seeds differ from the first training loss on."""
    rng = np.random.default_rng(2)
    for side in "ab":
        for seed in range(6):
            loss = LOSS + rng.normal(0, 1e-3) + 0.02 * (side == "b")
            path = write(tmp_path / side / str(seed), seed, 80 + rng.normal(0, 0.05), loss)
            text = path.read_text().splitlines()
            first = json.loads(text[1])
            text[1] = json.dumps({**first, "val_loss": 10.8 + rng.normal(0, 1e-3)})
            path.write_text("\n".join(text) + "\n")
    found = report(tmp_path)
    assert found["parts_at"] == 900 and "part at step 900" in found["curves"]
    assert "equal seeds have equal losses until step 0 (validation)" in found["notes"]


def test_curves_of_training_losses_where_no_validation_is_shared(tmp_path):
    rng = np.random.default_rng(2)
    for side, steps in (("a", 1000), ("b", 2000)):
        for seed in range(4):
            write(tmp_path / side / str(seed), seed, 80.0 + rng.normal(), LOSS + rng.normal(0, 1e-3), steps=steps)
    found = report(tmp_path)
    assert found["parts_at"] == 200 and "mean training curves part at step 200" in found["curves"]


@pytest.mark.parametrize("header, named", [
    ({"hardware": "NVIDIA H200 x 8"}, "hardware"), ({"world_size": 4}, "world_size"), ({"torch": "2.12.0"}, "torch")])
def test_other_kinds_of_machines_and_software(tmp_path, header, named):
    """Refused unless --across, which says what it can hide and decides only what no kind explains."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, **header)
    pool(tmp_path / "far", "a", A_LOSSES, A_TIMES)
    pool(tmp_path / "far", "b", B_LOSSES, [seconds - 10 for seconds in B_TIMES], **header)
    found = report(tmp_path)
    assert found["verdict"] == "not comparable" and named in found["reason"] and found["time"] is None
    assert "--across" in found["reason"] and found["loss"] is not None

    across = report(tmp_path, across=True)
    assert across["verdict"] == "undecided" and "8.0%" in across["reason"]
    assert compare.ACROSS in across["notes"] and named in across["environment"]
    assert report(tmp_path / "far", across=True)["verdict"] == "faster"


@pytest.mark.parametrize("header", [{"nccl": "2.1"}, {"git_commit": "abc"}])
def test_a_fact_that_does_not_bear_on_times_refuses_nothing(tmp_path, header):
    pool(tmp_path, "a", A_LOSSES, A_TIMES, first=NOON)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, first=NOON + RUN_S, **header)
    if "nccl" in header:                                                  # said on one side only: unknown is not equal
        found = report(tmp_path)
        assert found["verdict"] == "undecided" and "2.0%" in found["reason"]
        return
    found = report(tmp_path)
    assert found["verdict"] == "faster" and compare.ACROSS not in report(tmp_path, across=True)["notes"]


def test_other_data_are_not_comparable_at_all(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, data_sha256="e" * 64)
    for across in (False, True):
        found = report(tmp_path, across=across)
        assert found["verdict"] == "not comparable" and "data" in found["reason"]


@pytest.mark.parametrize("odd, reason", [({"steps": 1200}, "1200"), ({"config": {"adam_lr": 0.1}}, "adam_lr")])
def test_a_side_of_several_recipes_is_not_comparable(tmp_path, odd, reason):
    pool(tmp_path, "a", A_LOSSES, A_TIMES, config={"adam_lr": 0.008})
    pool(tmp_path, "b", B_LOSSES, B_TIMES, config={"adam_lr": 0.008})
    write(tmp_path / "b" / "odd", 9, 79.0, 3.2785, **{"config": {"adam_lr": 0.008}, **odd})
    found = report(tmp_path)
    assert found["verdict"] == "not comparable" and reason in found["reason"]


def test_a_difference_of_settings_between_the_sides_is_shown(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES, config={"row_comms": "dense"})
    pool(tmp_path, "b", B_LOSSES, B_TIMES, config={"row_comms": "sparse"}, source_sha256="6" * 64)
    found = report(tmp_path)
    assert found["config"] == {"row_comms": (["dense"], ["sparse"]), "source_sha256": (["5" * 64], ["6" * 64])}
    assert "row_comms dense -> sparse" in compare.text(found)


def test_the_same_runs_on_both_sides(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", A_LOSSES, A_TIMES)
    assert report(tmp_path)["verdict"] == "not comparable" and "5 runs are on both sides" in report(tmp_path)["reason"]


def test_what_does_not_count_is_listed(tmp_path):
    """Aborted and unfinished runs are no results, a void time is no time, a run that diverged forbids a verdict."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES)
    write(tmp_path / "b" / "profiled", 7, 200.0, 3.2780, result={"void": "profiled"})
    for name, last in (("aborted", {"type": "aborted", "step": 3, "cause": "out of memory"}), ("cut", None)):
        path = write(tmp_path / "b" / name, 8, 80.0 + len(name), 3.2780)
        lines = path.read_text().splitlines()[:-1] + ([json.dumps(last)] if last else [])
        path.write_text("\n".join(lines) + "\n")
    found = report(tmp_path)
    assert found["verdict"] == "faster" and found["b"]["runs"] == 6 and found["b"]["time"].n == 5
    aborted, cut = found["b"]["not_counted"]
    assert aborted.endswith("aborted: out of memory") and cut.endswith("no result line and no cause")
    assert "profiled" in found["b"]["times_void"][0]
    write(tmp_path / "b" / "nan", 11, 79.0, math.nan)
    assert report(tmp_path)["verdict"] == "undecided" and "no finite loss" in report(tmp_path)["reason"]


def test_phases_show_work_that_left_the_clock(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES, phases=[{"name": "tables", "ms": 900.0, "timed": True}])
    untimed = [{"name": "tables of stage 1", "ms": 300.0, "timed": False},
               {"name": "tables", "ms": 900.0, "timed": False}]
    pool(tmp_path, "b", B_LOSSES, B_TIMES, phases=untimed)
    found = report(tmp_path)
    assert found["phases"] == [{"name": "tables", "timed": True, "a_s": pytest.approx(0.9), "b_s": 0.0},
                               {"name": "tables of stage 1", "timed": False, "a_s": 0.0, "b_s": pytest.approx(0.3)},
                               {"name": "tables", "timed": False, "a_s": 0.0, "b_s": pytest.approx(0.9)}]
    assert ("phases off the clock: A 0.00 s, B 0.90 s; tables of stage 1 0.00, 0.30; tables 0.00, 0.90"
            in compare.text(found)), "a part counts once"


def test_one_run_a_side_decides_nothing(tmp_path):
    pool(tmp_path, "a", A_LOSSES[:1], A_TIMES[:1])
    pool(tmp_path, "b", B_LOSSES[:1], B_TIMES[:1])
    found = report(tmp_path)
    assert found["verdict"] == "undecided" and "nan" not in compare.text(found)


def test_more_runs_that_would_settle_it(tmp_path):
    pool(tmp_path, "a", A_LOSSES, [80.0, 80.3, 79.7, 80.1, 79.9])
    pool(tmp_path, "b", B_LOSSES, [79.6, 79.9, 79.5, 80.1, 79.7])
    found = report(tmp_path)
    assert found["verdict"] == "undecided" and 5 < found["runs_to_settle"] < 60
    assert f"settled by about {found['runs_to_settle']} runs a side" in compare.text(found)


def test_logs_of_peers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    peers(tmp_path)
    (tmp_path / "a" / "README.md").write_text("times = [80.0, 80.1]\n")
    found = report(tmp_path, target=3.28)
    assert found["verdict"] == "faster" and found["a"]["families"] == {"D": 5} and found["a"]["p_target"] < 0.01
    assert found["method"].startswith("5 pairs by clock")
    assert found["a"]["not_read"] == ["a/README.md: lists of 2 runs in a README: logs count"]
    peer(tmp_path / "a" / "cut.txt", 70.0, 3.30, 11, end=1300)
    assert report(tmp_path)["a"]["not_counted"] == ["a/cut.txt: stops at 1300 of 1400"]


def test_runs_cut_short_on_one_side_only_do_not_count(tmp_path):
    """Of both sides it may be the plan; --steps says that it was."""
    peers(tmp_path / "both", end=1300)
    found = report(tmp_path / "both")
    assert found["verdict"] == "faster" and found["a"]["notes"] == ["stops at 1300 of 1400 (5 runs)"]

    peers(tmp_path, b_end=1300)
    found = report(tmp_path)
    assert found["verdict"] == "not comparable" and "--steps=1300" in found["reason"]
    chosen = [compare.side_of("A", [tmp_path / "a"], sides.Choice(steps=1250)),
              compare.side_of("B", [tmp_path / "b"], sides.Choice(steps=1250))]
    assert compare.compare(*chosen)["verdict"] == "faster"
    assert {run.final.step for side in chosen for run in side.runs} == {1250}
    assert {run.val[-1].step for side in chosen for run in side.runs} == {1250}


def test_other_machines_of_one_kind_decide_nothing_below_the_floor(tmp_path):
    """By their driver, or by their day: 1.2 % are a machine's. 12 % are not."""
    for name, of_b in (("driver", {"driver": "580.126.09"}), ("day", {"day": 22})):
        peers(tmp_path / name, **of_b)
        found = report(tmp_path / name)
        assert found["verdict"] == "undecided" and found["floor"] == timing.FLOOR
        assert report(tmp_path / name, same_machine=True)["verdict"] == "undecided", "what logs say stands"
        for k in range(5):
            peer(tmp_path / name / "b" / f"{k}.txt", B_TIMES[k] - 9, B_LOSSES[k], 2 * k + 1, "# B\n", **of_b)
        assert report(tmp_path / name)["verdict"] == "faster"


def test_runs_that_overlap_are_of_two_machines(tmp_path):
    """Or disturbed each other: both sides started at the same minutes, 80 s each."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES, first=NOON)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, first=NOON + 10)
    found = report(tmp_path)
    assert found["verdict"] == "undecided" and "several rentals" in found["method"]


def test_edited_finals_are_named_and_not_used(tmp_path):
    """B's final times are 2 s less than its averages say: no time of B counts."""
    peers(tmp_path)
    for k in range(5):
        path = tmp_path / "b" / f"{k}.txt"
        ms = f"{1000 * B_TIMES[k]:.0f}"
        text = path.read_text()
        assert text.count(f"train_time:{ms}ms") == 1
        path.write_text(text.replace(f"train_time:{ms}ms", f"train_time:{int(ms) - 2000}ms"))
    found = report(tmp_path, target=3.28)
    assert found["verdict"] == "undecided" and found["b"]["time"].n == 0 and len(found["b"]["times_void"]) == 5
    assert "step_avg" in found["b"]["times_void"][0] and found["b"]["p_target"] < 0.01


def test_a_run_that_tells_two_losses_is_not_counted(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES)
    write(tmp_path / "b" / "two", 9, 79.0, 3.279, NOON, result={"val_loss": 3.27})
    found = report(tmp_path)
    assert found["verdict"] == "faster" and found["b"]["runs"] == 5
    assert "the result says a loss of 3.27, the last validation 3.279" in found["b"]["not_counted"][0]


def test_lists_of_a_readme_are_compared_if_the_user_states_one_machine(tmp_path):
    (tmp_path / "a.md").write_text(f"losses = {A_LOSSES}\ntimes = {A_TIMES}\n")
    (tmp_path / "b.md").write_text(f"losses = {B_LOSSES}\ntimes = {[t * 1000 for t in B_TIMES]}\n")
    lists = [compare.side_of(name.upper(), [tmp_path / f"{name}.md"]) for name in "ab"]
    found = compare.compare(*lists)
    assert found["verdict"] == "undecided" and "is not said" in found["reason"]
    assert "hardware of A is not recorded" in found["notes"]
    assert compare.compare(*lists, same_machine=True)["verdict"] == "faster"
    found = compare.compare(compare.side_of("A", [GOLDEN / "r_readme"]), compare.side_of("B", [tmp_path / "b.md"]))
    assert found["verdict"] == "not comparable" and "several lists" in found["reason"]


@pytest.mark.parametrize("side", "ab")
def test_unknown_is_not_equal(tmp_path, side):
    """6,015 s against 811 s: a side that does not say its machine decides nothing, whatever the difference."""
    pool(tmp_path, "a", A_LOSSES, [seconds * 7 for seconds in A_TIMES], **({"hardware": None} if side == "a" else {}))
    pool(tmp_path, "b", B_LOSSES, B_TIMES, **({"hardware": None} if side == "b" else {}))
    found = report(tmp_path)
    assert found["verdict"] == "undecided" and f"clock of {side.upper()} is not said" in found["reason"]
    assert report(tmp_path, same_machine=True)["verdict"] == "faster"


def test_a_statement_does_not_overrule_what_logs_say(tmp_path):
    """No dates, and two drivers: --same-machine cannot make one machine of them. Without drivers it can."""
    for name, drivers in (("two", ("570", "580")), ("unsaid", (None, None))):
        for side, losses, times, driver in (("a", A_LOSSES, A_TIMES, drivers[0]), ("b", B_LOSSES, B_TIMES, drivers[1])):
            for k in range(5):
                write(tmp_path / name / side / str(k), k, times[k], losses[k], driver=driver)
    assert report(tmp_path / "two", same_machine=True)["verdict"] == "undecided"
    assert report(tmp_path / "unsaid")["verdict"] == "undecided"
    assert report(tmp_path / "unsaid", same_machine=True)["verdict"] == "faster"


def test_a_list_in_a_readme_says_neither_machine_nor_clock():
    (run, *_) = logs.read([GOLDEN / "r_readme"]).runs
    assert sides.clock_of(run) is None and sides.machine_of(run) is None
    run.facts = {**run.facts, "hardware": "eight GPUs"}
    assert sides.machine_of(run) is None


def test_the_same_program_is_never_faster_or_slower(tmp_path):
    """On two days, 1.2 % apart at p = 6e-12; other seeds and run directories are no difference, other flags are."""
    for side, day in (("a", 0), ("b", 86400)):
        pool(tmp_path, side, A_LOSSES if side == "a" else B_LOSSES, A_TIMES if side == "a" else B_TIMES,
             first=NOON + day, source_sha256="5" * 64, config={"adam_lr": 0.1})
    found = report(tmp_path)
    assert found["verdict"] == "same program" and "-1.2" in found["reason"] and found["time"].p < 1e-5
    pool(tmp_path / "c", "a", A_LOSSES, A_TIMES, source_sha256="5" * 64, config={"adam_lr": 0.1})
    pool(tmp_path / "c", "b", B_LOSSES, B_TIMES, source_sha256="5" * 64, config={"adam_lr": 0.2})
    assert report(tmp_path / "c")["verdict"] == "faster"


def test_what_one_program_differs_by_between_days_is_the_floor(tmp_path):
    """A ran on two days, 3 % apart: B's 2.3 % less on a third day is no news."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES, first=NOON)
    for k in range(3):
        write(tmp_path / "a" / f"other_{k}", 10 + k, 82.4 + 0.01 * k, LOSS, NOON + 86400 + RUN_S * k)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, first=NOON + 2 * 86400)
    found = report(tmp_path)
    assert found["verdict"] == "undecided" and found["floor"] == pytest.approx(82.41 / 80 - 1)


def test_fewer_steps_alone_explain_a_difference_between_days(tmp_path):
    """Five of 1,390 steps fewer, 0.36 % less time: decided. As much less time with equal steps: not."""
    for name, steps in (("fewer", 1385), ("equal", 1390)):
        pool(tmp_path / name, "a", A_LOSSES, A_TIMES, steps=1390)
        less = [seconds * 1385 / 1390 for seconds in A_TIMES]
        pool(tmp_path / name, "b", B_LOSSES, less, first=NOON + 86400, steps=steps)
        pool(tmp_path / name / "tight", "a", A_LOSSES, [80 + seconds / 1000 for seconds in A_TIMES], steps=1390)
        less = [(80 + seconds / 1000) * 1385 / 1390 for seconds in A_TIMES]
        pool(tmp_path / name / "tight", "b", B_LOSSES, less, first=NOON + 86400, steps=steps)
    assert report(tmp_path / "equal" / "tight", target=3.28)["verdict"] == "undecided"
    found = report(tmp_path / "fewer" / "tight", target=3.28)
    assert found["verdict"] == "faster" and "both sides prove" in found["reason"]


@pytest.mark.parametrize("above, word", [(0.0, "faster"), (0.0012, "undecided"), (0.002, "no record")])
def test_the_target_decides(tmp_path, above, word):
    """B is 1 s faster; its mean loss is 3.27822 + above, with a standard error of 0.0003."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", [loss + above for loss in B_LOSSES], B_TIMES)
    found = report(tmp_path, target=3.28)
    assert found["verdict"] == word
    assert (found["b"]["p_target"] < 0.01) == (word == "faster")


def test_losses_that_are_not_said_miss_no_target(tmp_path):
    for side, times in (("a", A_TIMES), ("b", B_TIMES)):
        (tmp_path / f"{side}.md").write_text(f"times = {times}\n")
    lists = [compare.side_of(name.upper(), [tmp_path / f"{name}.md"]) for name in "ab"]
    found = compare.compare(*lists, target=3.28, same_machine=True)
    assert (found["verdict"], found["reason"]) == ("undecided", "B's losses are not said")
    assert pool_of_runs.show(lists[0], 3.28)["verdict"] == "undecided"


@pytest.mark.parametrize("setting", ["--target=nan", "--target=0", "--target=-1", "--floor=nan", "--margin=nan",
                                     "--margin=-1", "--target=inf", "--steps=1,2,3", "--source=a,b,c"])
def test_a_setting_that_no_comparison_can_have_is_refused(tmp_path, setting):
    """A floor of nan would let every difference through."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES)
    with pytest.raises(ToolError, match=setting.partition("=")[0]):
        compare.main([str(tmp_path / "a"), str(tmp_path / "b"), setting])
    if setting.startswith("--target"):
        with pytest.raises(ToolError, match="--target"):
            pool_of_runs.main_show([str(tmp_path / "a"), setting])


def test_mixed_sources_are_refused_with_the_list_and_can_be_chosen(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES)
    write(tmp_path / "b" / "old", 9, 85.0, LOSS, NOON, source_sha256="7" * 64)
    found = report(tmp_path)
    assert found["verdict"] == "not comparable"
    assert "5 runs of 66666666; 1 runs of 77777777; choose with" in found["reason"]
    for choice in (sides.Choice(source="66"), sides.Choice(exclude=("old",))):
        b = compare.side_of("B", [tmp_path / "b"], choice)
        assert compare.compare(compare.side_of("A", [tmp_path / "a"]), b)["verdict"] == "faster"
        assert len(b.runs) == 5 and len(b.left) == 1
    with pytest.raises(ToolError, match="its source is 66666666"):
        compare.side_of("B", [tmp_path / "b"], sides.Choice(source="abc"))


def test_an_unknown_source_beside_a_known_one_is_another(tmp_path):
    """A console copy without its source among logs that have it."""
    peers(tmp_path)
    path = tmp_path / "b" / "4.txt"
    path.write_text(path.read_text().split("=" * 100 + "\n")[-1])
    found = report(tmp_path, target=3.28)
    assert found["verdict"] == "not comparable" and "1 runs of not known; choose with" in found["reason"]
    side = compare.side_of("B", [tmp_path / "b"], sides.Choice(exclude=("4.txt",)))
    assert compare.mixtures(side) == [] and pool_of_runs.show(side, 3.28)["verdict"] == "proven"


def test_every_golden_family_can_be_a_side():
    paths = [path for path in GOLDEN.iterdir() if path.name not in ("z_no_logs", "reports")]
    for path in paths:
        found = compare.compare(compare.side_of("A", [path]), compare.side_of("B", [GOLDEN / "d_timing.txt"]))
        assert found["verdict"] in ("undecided", "not comparable", "same program")
        assert len(compare.text(found).splitlines()) <= 40
        json.dumps(compare.jsonable(found), allow_nan=False)


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "records"), *map(str, arguments)], capture_output=True, text=True)


def test_the_command(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES)
    done = run("compare", tmp_path / "a", tmp_path / "b", "--target=3.28", "--plot", tmp_path / "p.png")
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) <= 40
    last = done.stdout.splitlines()[-1]
    assert last.startswith("verdict: faster: both sides prove the target of 3.28, and B takes 0.98")
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    done = run("compare", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(done.stdout)
    assert found["verdict"] == "faster" and found["time"]["p"] < 1e-3 and found["a"]["loss"]["n"] == 5
    assert " " not in "".join(keys_of(found)) and found["a"]["paths"] == [str(tmp_path / "a")]


def keys_of(value) -> list[str]:
    """All keys of nested objects, but those that are names of things: families, settings."""
    if isinstance(value, list):
        return [key for item in value for key in keys_of(item)]
    if not isinstance(value, dict):
        return []
    return [key for key in value] + [key for item in value.values() for key in keys_of(item)]


def test_several_paths_patterns_and_choices_on_the_command_line(tmp_path):
    """The exit status says the verdict."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES)
    a = [tmp_path / "a" / f"run_{k}" for k in range(5)]
    done = run("compare", *a[:3], *a[3:], "--against", tmp_path / "b" / "run_[0-4]")
    assert done.returncode == 0 and "5 runs of 5 seeds" in done.stdout
    assert run("compare", tmp_path / "b", tmp_path / "a").returncode == verdict.STATUS["slower"]
    assert run("compare", tmp_path / "a", tmp_path / "b", "--target=3.2").returncode == verdict.STATUS["no record"]
    one = run("compare", *a[:1], "--against", tmp_path / "b" / "run_0", "--exclude=nothing")
    assert one.returncode == verdict.STATUS["undecided"]
    done = run("compare", tmp_path / "a", tmp_path / "b", "--steps=900,1000")
    assert "taken at step 900 (5 runs)" in done.stdout and "B's loss is lower" in done.stdout
    assert run("compare", *a[:3]).returncode == 2 and run("compare", *a[:2], "--steps=x").returncode == 2
    assert len(set(verdict.STATUS.values())) == len(verdict.STATUS) and not {1, 2} & set(verdict.STATUS.values())


@pytest.mark.parametrize("content, found", [
    ("a folder", "no file"), (None, "bad"), (bytes(range(256)) * 9, "binary"), (b"", "empty"),
    (b"step:1/2 val_loss:3.2\n", "no validation line")])
def test_bad_input_is_status_2_with_a_reason(tmp_path, content, found):
    """Also if the other side can be read."""
    bad = tmp_path / "bad"
    if content == "a folder":
        bad.mkdir()
    elif content is not None:
        bad.write_bytes(content)
    for pair in ((bad, GOLDEN / "d_timing.txt"), (GOLDEN / "d_timing.txt", bad)):
        with pytest.raises(ToolError, match=found):
            compare.main(list(map(str, pair)))


def test_status_and_help():
    done = run("compare", GOLDEN / "nowhere", GOLDEN / "d_timing.txt")
    assert done.returncode == 2 and done.stdout == "" and "nowhere" in done.stderr and "do:" in done.stderr
    assert run("compare", GOLDEN).returncode == 2 and run("nonsense").returncode == 2 and run().returncode == 2
    done = run("--help")
    assert done.returncode == 0
    verbs = ("compare", "show", "place", "bench", "ablate", "new", "check", "table")
    assert all(f"\n{verb} " in done.stdout for verb in verbs)


def test_plots_with_one_point_without_times_and_of_many_groups(tmp_path):
    """No run of the golden files may break a plot; shelf draws any number of groups."""
    groups = {path.name: logs.read([path]).runs[:1] for path in sorted(GOLDEN.glob("*_*.*")) + [GOLDEN / "i_one"]}
    compare.plot(groups, tmp_path / "p.png")
    compare.plot({"A": groups["a_llmc.log"]}, tmp_path / "q.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000 and (tmp_path / "q.png").stat().st_size > 5_000


def test_a_plot_starts_where_the_curves_part(tmp_path):
    """At the last validation at which the bands of the first two groups still touch; else it shows the whole run."""
    pool(tmp_path / "apart", "a", A_LOSSES, A_TIMES)
    pool(tmp_path / "apart", "b", B_LOSSES, B_TIMES)
    groups = {name: logs.read([tmp_path / "apart" / name]).runs for name in "ab"}
    assert plots.first_apart([plots.Curve(runs) for runs in groups.values()]) == 0

    for run in groups["b"]:
        run.val[-1] = run.val[-1]._replace(loss=run.val[-1].loss + 0.1)
    curves = [plots.Curve(runs) for runs in groups.values()]
    assert plots.first_apart(curves) == 900
    assert curves[0].steps == [0, 900, 1000] and curves[0].times == pytest.approx([0, 72, 80])
    assert plots.index_from(curves[0].steps, 900) == 1 == plots.index_near_end(curves[0].steps)
    plots.plot(groups, tmp_path / "p.png", 3.28)
    assert (tmp_path / "p.png").stat().st_size > 10_000


FAMILIES = {"d_timing.txt": 900, "e1_seconds.txt": 300, "c_nan.txt": 120, "b_train_loss.txt": 80,
            "e2_seconds_steps.txt": 40, "f_extra_keys.txt": 30, "h_console.stdout": 30}     # as often as in public


def generated(name: str, number: int, rng: np.random.Generator) -> str:
    """A log of the family of a golden file: its environment, 120 kB of source, 1,400 steps and 7 validations."""
    golden = (GOLDEN / name).read_text()
    separator = "=" * 100 + "\n"
    head = golden[:golden.rindex(separator) + len(separator)] if separator in golden else ""
    if head:
        line = "    x_{} = f(y, print0(f'step:{{step}}/{{total}} val_loss:{{v:.4f}}'))  # {}\n"
        head = "".join(line.format(k, number) for k in range(1700)) + head
    in_seconds = "train_time" in golden and "ms step_avg" not in golden.split("train_time:")[-1]
    step_ms = rng.normal(56, 0.05)
    lines = [head]
    for step in range(1401):
        time = f"{step * step_ms / 1000:.3f}s" if in_seconds else f"{step * step_ms:.0f}ms"
        about = f"train_time:{time} step_avg:{step_ms:.2f}ms\n"
        trained = "train_loss:3.5000 " if name.startswith("b") else ""
        if step and not name.startswith(("e1", "f", "h")):
            lines.append(f"step:{step}/1400 {trained}{about}")
        if step % 250 == 0 or step == 1400:
            lines.append(f"step:{step}/1400 val_loss:{3.278 + (1400 - step) * 1e-3 + rng.normal(0, 1e-3):.4f} {about}")
    return "".join(lines)


def forget(path: Path) -> None:
    """Take a file out of the cache of the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.all
def test_1500_logs(tmp_path):
    """Some 260 MB, from the disk; the seconds are printed, for they are of the machine."""
    rng = np.random.default_rng(0)
    number = 0
    for name, count in FAMILIES.items():
        for _ in range(count):
            path = tmp_path / "ab"[number % 2] / str(number // 100) / f"{number}{Path(name).suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(generated(name, number % 2, rng))
            number += 1
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in paths:
        forget(path)
    began = time.monotonic()
    done = run("compare", tmp_path / "a", tmp_path / "b", "--target=3.28")
    seconds = time.monotonic() - began
    size = sum(path.stat().st_size for path in paths)
    print(f"\n{len(paths)} logs, {size / 1e6:.0f} MB, {logs.cores()} cores: {seconds:.1f} s")
    assert done.returncode in verdict.STATUS.values() and len(paths) == 1500 and 200e6 < size
    assert "750 runs of 750 seeds" in done.stdout

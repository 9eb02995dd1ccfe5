"""records/tools/report.py: which runs count, when a verdict is given, and what is printed."""
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from record_common import (A_LOSSES, A_TIMES, B_LOSSES, B_TIMES, GOLDEN, NO_FLAGS, NOON, RUN_S, SOURCE,
                           TARGET, call, compare, events_of, make_bench_run, make_run, make_side, make_sides,
                           write_events)

from tools import report, show as show_verb                  # noqa: E402
from tools.read import ToolError, read_runs                  # noqa: E402
from tools.statistics import look_level                      # noqa: E402

HIGHER = [loss + 0.01 for loss in B_LOSSES]                   # significantly above the target
LEVEL = [TARGET + off for off in (-0.0002, 0.0008, -0.0011, 0.0004, -0.0006)]

def show(pool: Path, *options: object) -> dict:
    return show_verb.show(report.side_of("pool", [pool]), *options)

@pytest.mark.parametrize("of_b, word", [
    (dict(), "faster"), (dict(times=[seconds + 2 for seconds in B_TIMES]), "slower"),
    (dict(), "same"),
    (dict(times=[80.0, 80.5, 79.6, 80.3, 79.7]), "undecided"), (dict(times=[79.0] * 5), "faster"),
    (dict(losses=HIGHER), "no record"), (dict(losses=LEVEL), "not proven")])
def test_compare__the_verdict_of_known_pairs(tmp_path, of_b, word) -> None:
    times = [80.0, 80.01, 79.99, 80.0, 80.01] if word == "same" else A_TIMES
    if word == "same":
        of_b = dict(times=[seconds + 0.001 for seconds in times])
    found = compare(*make_sides(tmp_path, dict(times=times), of_b), TARGET)
    assert found["verdict"] == word, found["reason"]

def test_compare__numbers_of_runs_in_turn(tmp_path) -> None:
    found = compare(*make_sides(tmp_path), TARGET)
    share = np.mean(np.log(B_TIMES) - np.log(A_TIMES))
    assert found["pairs"] == 5 and found["share"].mean == pytest.approx(share, abs=2e-4)
    assert found["loss"].mean == pytest.approx(np.mean(B_LOSSES) - np.mean(A_LOSSES))
    assert "proven by 5 of 5 started" in found["reason"] and "B takes 1.2" in found["reason"]

def test_compare__no_verdict_on_time_without_a_bench(tmp_path) -> None:
    found = compare(*make_sides(tmp_path, bench=False), TARGET)
    assert found["verdict"] == "not measured in turn", found["reason"]
    assert "no bench has runs of both" in found["reason"] and "python records bench" in found["reason"]
    assert found["share"] is None and "time -1.24% (no test)" in report.compare_in_words(found)

@pytest.mark.parametrize("b, first_reason", [
    (dict(hardware="NVIDIA H200 x 8", python="3.12"), "-> NVIDIA H200 x 8"),
    (dict(world_size=1), "world_size: 8 -> 1"), (dict(data_sha256="e" * 64), "data"), (dict(config=dict(lr=0.2)), "")])
def test_refusals__the_most_important_reason_is_first(tmp_path, b, first_reason) -> None:
    found = compare(*make_sides(tmp_path, b=b), TARGET)
    assert (found["verdict"] == "not comparable") == bool(first_reason)
    if first_reason:
        assert found["reason"].startswith("different ") and first_reason in found["reason"], found["reason"]

def test_refusals__runs_on_both_sides_and_mixtures(tmp_path) -> None:
    a, b = make_sides(tmp_path, bench=False)
    assert compare(a, a)["reason"] == "both sides have 5 runs in common"
    c = make_run(tmp_path / "c", 9, 3.27, 78.0)
    mixed = report.compare(report.side_of("A", [a]), report.side_of("B", [b, c]))
    assert mixed["verdict"] == "not comparable" and "B mixes source_sha256" in mixed["reason"]

def test_same_program__and_a_run_that_was_resumed_with_another_source(tmp_path) -> None:
    a, b = make_sides(tmp_path, b=dict(source=SOURCE))
    assert compare(a, b, TARGET)["verdict"] == "same program"
    newer = make_sides(tmp_path / "newer", b=dict(source=SOURCE, python="3.12"))
    assert compare(*newer, TARGET)["verdict"] == "faster", "with another Python, a difference is not chance"
    for log in b.glob("*/log.jsonl"):
        header, *events = events_of(log)
        later = header | dict(type="resumed", step=4, source_sha256="9" * 64)
        write_events(log, [header, *events[:6], later, *events[6:]])
    with pytest.raises(ToolError, match="resumed with another source_sha256"):
        compare(a, b, TARGET)

@pytest.mark.parametrize("losses, word, said", [
    ([3.2751], "not proven", "not proven by 1 of 1 started (n = 1)"), ([3.29], "not proven", "(n = 1)"),
    (A_LOSSES, "proven", "proven by 5 of 5 started (n = 5, p 0.0074, level 0.01)"),
    (HIGHER, "no record", "not below it, by 5 of 5"), (LEVEL, "not proven", "not proven by 5 of 5 started")])
def test_proof__n_p_and_how_many_were_started(tmp_path, losses, word, said) -> None:
    found = show(make_side(tmp_path / "a", losses, [80.0] * len(losses)), TARGET)
    assert found["verdict"] == word and said in found["reason"], found["reason"]

def test_proof__runs_that_did_not_end_or_were_left_out_are_counted(tmp_path) -> None:
    pool = make_side(tmp_path / "a")
    aborted = dict(type="aborted", cause="Ctrl-C")
    for seed in (7, 8):
        run = make_run(pool / f"seed{seed}", seed, 3.29, 80.0, NOON + 9000 + seed * RUN_S)
        events = events_of(run / "log.jsonl")[:5]
        write_events(run / "log.jsonl", [*events, aborted])
    found = show(pool, TARGET)
    assert found["verdict"] == "partly proven" and "proven by 5 of 7 started (n = 5" in found["reason"]
    assert call("show", pool, f"--target={TARGET}")[0] == 7
    assert any("not counted: 2 runs: " in note and "interrupted at step 2" in note for note in found["notes"])

@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize("target", [3.3, None])
def test_verdict__in_favor_of_b_needs_all_started_runs(tmp_path, failing, target) -> None:
    a, b = make_sides(tmp_path)
    assert compare(a, b, target)["verdict"] == "faster" and compare(b, a, target)["verdict"] == "slower"
    failed = dict(run=11, pair=6, side=failing, folder=f"{failing}/failed")
    with open(tmp_path / "manifest.jsonl", "a") as file:
        for line in (dict(type="start", **failed), dict(type="end", **failed, outcome="failed")):
            file.write(json.dumps(line) + "\n")
    found = compare(a, b, target)
    assert found["verdict"] == "partly proven" and "B takes 1.2" in found["reason"], found["reason"]
    assert f"5 of 6 started runs of {failing.upper()} count" in found["reason"]
    assert compare(b, a, target)["verdict"] == "slower", "a verdict against B does not change"

@pytest.mark.parametrize("failing", ["a", "b"])
def test_sorted_out__a_run_that_failed_after_its_result_does_not_count(tmp_path, failing) -> None:
    a, b = make_sides(tmp_path)
    lines = [line | dict(outcome="failed") if line["type"] == "end" and line["folder"] == f"{failing}/seed4" else line
             for line in events_of(tmp_path / "manifest.jsonl")]
    write_events(tmp_path / "manifest.jsonl", lines)
    found = compare(a, b)
    assert (found["verdict"], found["pairs"]) == ("partly proven", 4) and "bench states: failed" in found["notes"][0]

@pytest.mark.parametrize("side", "ab")
def test_verdict__diverged_runs_of_either_side(tmp_path, side) -> None:
    losses = [*A_LOSSES[:4], math.nan]
    a, b = make_sides(tmp_path, **{side: dict(losses=losses)})
    found = compare(a, b, TARGET)
    assert found["verdict"] == "undecided" and f"1 of 5 runs of {side.upper()} have no finite loss" in found["reason"]
    found = show(tmp_path / side, 3.5)
    assert found["verdict"] == "not proven" and "1 of 5 runs of pool have no finite loss" in found["reason"]

def test_proof__needs_the_seed_of_each_run(tmp_path) -> None:
    pool = make_side(tmp_path / "a")
    assert show(pool, TARGET)["verdict"] == "proven"
    log = pool / "seed2/log.jsonl"
    header, *events = events_of(log)
    del header["seed"]
    write_events(log, [header, *events])
    found = show(pool, TARGET)
    assert found["verdict"] == "not proven" and "does not state its seed" in found["reason"]

@pytest.mark.parametrize("off, word", [(0.01, "higher loss"), (-0.01, "lower loss"), (0.0, "faster")])
def test_verdict__without_a_target_the_loss_comes_first(tmp_path, off, word) -> None:
    found = compare(*make_sides(tmp_path, b=dict(losses=[loss + off for loss in B_LOSSES])))
    assert found["verdict"] == word and "B takes 1.2" in found["reason"]

def test_sorted_out__runs_of_two_lengths_are_no_pool(tmp_path) -> None:
    pool = make_side(tmp_path / "a")
    make_run(pool / "longer", 8, 3.1, 160.0, steps=20)
    assert "mixes last steps" in show(pool)["reason"]
    log = make_run(tmp_path / "b/cut", 9, 3.1, 80.0) / "log.jsonl"
    write_events(log, events_of(log)[:9])
    with pytest.raises(ToolError, match="has no finished run"):
        report.side_of("pool", [tmp_path / "b"])

def make_bench(folder: Path, planned: int, a_losses: Sequence[float] = [3.27 + pair / 1e4 for pair in range(5)],
               changes: Sequence[float] = (0.0,) * 5, order: str = "ABBAABBAAB", **plan: object) -> list[report.Side]:
    """Write a bench with one seed per pair, in which B takes 1 % less time, and return its sides.

    a_losses: by pair. changes: B's losses minus A's. plan: further facts of its first line.
    """
    lines = [dict(type="bench", pairs=planned, sides=NO_FLAGS) | plan]
    for number, name in enumerate(order, 1):
        pair = (number - 1) // 2
        seconds = dict(A=A_TIMES, B=B_TIMES)[name][pair] + number / 1e3
        loss = a_losses[pair] + (changes[pair] if name == "B" else 0)
        lines += make_bench_run(folder, number, pair, name, loss, seconds, source=name)
    write_events(folder / "manifest.jsonl", lines)
    return [report.side_of(name, sorted(folder.glob(f"runs/*_{name}"))) for name in "AB"]

@pytest.mark.parametrize("planned", [10, 6])
@pytest.mark.parametrize("order", ["ABBAABBAAB", "BAABABBABA"])
def test_last_look__a_bench_counts_to_its_last_test(tmp_path, planned, order) -> None:
    a, b, look = report.last_look(*make_bench(tmp_path, planned, order=order))
    assert look.level == look_level(4, planned)
    in_turn = sorted((report.manifest_of(run)[1]["run"], side.name) for side in (a, b) for run in side.runs)
    assert "".join(name for _, name in in_turn) == order[:8]
    assert len(a.losses()) == len(b.losses()) == 4 and b.started == 4, "losses of the same pairs"

def test_proof__in_a_bench_at_the_level_of_its_last_test(tmp_path) -> None:
    losses = [3.2773, 3.2788, 3.2768, 3.2783, 3.2701]
    found = report.compare(*make_bench(tmp_path / "a", 10, losses), TARGET)
    assert 0.005 < found["b"]["p"] < 0.01 and found["b"]["loss"].n == 4
    assert found["verdict"] == "not proven" and "level 0.00125" in found["reason"], found["reason"]
    found = report.compare(*make_bench(tmp_path / "b", 4, [loss - 0.0002 for loss in losses]), TARGET)
    assert found["verdict"] == "faster" and "proven by 4 of 4 started" in found["reason"], "the bench has one test"
    above = [loss + 0.02 for loss in losses]
    found = report.compare(*make_bench(tmp_path / "c", 10, above, order="ABBAAB"), TARGET)
    assert found["verdict"] == "not proven" and "no test yet" in found["reason"], "a bench has no test after 3 pairs"
    assert report.compare(*make_bench(tmp_path / "d", 10, above), TARGET)["verdict"] == "no record"
    off = [TARGET + 0.0006 + x for x in (-2e-4, 2e-4, 1e-4, 4e-4, 0)]
    found = report.compare(*make_bench(tmp_path / "e", 10, off), TARGET)
    assert found["b"]["p"] > 0.99 and found["verdict"] == "not proven", "the level also holds for `no record`"

def test_loss_difference__pairs_of_one_seed(tmp_path) -> None:
    shape = dict(planned=3, order="ABBAAB", a_losses=[2.31, 2.27, 2.34], changes=[-0.0058, -0.0055, -0.0052])
    found = report.compare(*make_bench(tmp_path / "new", **shape, losses="paired"))
    assert found["verdict"] == "lower loss" and found["loss"].p == pytest.approx(0.00099, abs=5e-6), found["reason"]
    earlier = report.compare(*make_bench(tmp_path / "old", **shape))
    assert earlier["verdict"] != "lower loss", "a bench keeps the test that its manifest states"
    sides = make_bench(tmp_path / "three", 3, order="ABBAABBA", losses="paired")
    sides[1].runs[0].seed = 99
    assert report.last_look(*sides)[2].has_paired_losses is False, "one pair has two seeds"

def test_loss_difference__no_test_if_the_losses_of_a_side_are_equal(tmp_path) -> None:
    """If seeds have no effect on a side, a t-test of its losses means nothing; two equal sides are compared exactly."""
    equal = [3.27] * 5
    cases = dict(constant=[-0.001, -0.002, -0.003, -0.004, -0.005], both=[-0.01] * 5, same=[0] * 5)
    for name, changes in cases.items():
        for kind in ({}, dict(losses="paired")):
            sides = make_bench(tmp_path / f"{name}{len(kind)}", 4, equal, changes=changes, **kind)
            found = report.compare(*sides)
            assert found["loss"].p == dict(same=1.0).get(name) and found["verdict"] == "faster", found["reason"]
            assert ("no test of the losses" in found["reason"]) == (name != "same")

def test_last_look__runs_outside_the_bench_do_not_count(tmp_path) -> None:
    a, b = make_bench(tmp_path, 10)
    expected = report.compare(a, b)
    for side, seconds in ((a, 99.0), (b, 60.0)):
        stray = make_run(tmp_path.parent / f"{tmp_path.name}_stray/{side.name}", 77, 3.27, seconds, NOON, side.name)
        side.runs += read_runs([stray]).runs
        side.started += 1
    found = report.compare(a, b)
    assert found["loss_level"] == look_level(4, 10) and found["pairs"] == 4
    for key in ("verdict", "share", "loss", "reason"):
        assert found[key] == expected[key], key
    assert any("not in the bench" in note for note in found["notes"]), found["notes"]

def test_last_look__benches_are_not_merged(tmp_path) -> None:
    sides = [make_bench(tmp_path / name, 4) for name in ("one", "two")]
    for run in (*sides[1][0].runs, *sides[1][1].runs):
        run.seed += 10
    for first, second in zip(*sides):
        first.runs += second.runs
    found = report.compare(*sides[0])
    assert found["verdict"] == "not comparable" and "runs of 2 benches" in found["reason"], found["reason"]
    assert found["share"] is None

@pytest.mark.parametrize("settings, why", [
    (dict(checkpoint_every=1), "different checkpoint_every in one bench: 0 and 1"),
    (dict(save="out"), "different save in one bench"), (dict(sample_tokens=9), "")])
def test_refusals__work_off_the_clock_is_equal_in_a_bench(tmp_path, settings, why) -> None:
    found = compare(*make_sides(tmp_path, dict(config=settings)))
    assert (found["verdict"] == "not comparable") == bool(why) and why in found["reason"], found["reason"]
    apart = compare(*make_sides(tmp_path / "pools", dict(config=settings), bench=False))
    assert apart["verdict"] != "not comparable", "outside of a bench, such settings may differ"

@pytest.mark.parametrize("is_resumed, why", [
    (True, "A has a run that was resumed"), (False, "only 4 of 5 runs of A have times")])
def test_why_no_times__times_of_all_runs(tmp_path, is_resumed, why) -> None:
    a, b = make_sides(tmp_path)
    header, *events, result = events_of(a / "seed1/log.jsonl")
    if is_resumed:
        events[5:5] = [header | dict(type="resumed", step=4)]
    else:
        result["void"] = "profiled"
    write_events(a / "seed1/log.jsonl", [header, *events, result])
    found = compare(a, b)
    assert found["verdict"] == "not measured in turn" and why in found["reason"]

@pytest.mark.parametrize("argv, status, said", [
    ([], 2, "try  "), (["--help"], 0, "verb"), (["shew"], 2, "one of try, bench"), (["compare"], 2, ""),
    (["show", "{a}", "--against", "{b}"], 2, "--against takes one run"), (["show", "none"], 2, "does not exist"),
    (["compare", "{a}", "--against", "{b}", "--target=3.28"], 0, "verdict: faster"),
    (["show", "{a}", "--target=3.28", "--json"], 0, '"verdict": "proven"'),
    (["show", "{golden}/z_no_logs"], 2, "no finished run")])
def test_main__status_and_words(tmp_path, argv, status, said) -> None:
    places = dict(zip("ab", make_sides(tmp_path)), golden=GOLDEN)
    argv = [word.format(**places) for word in argv]
    try:
        found, out, err = call(*argv)
    except SystemExit as error:                               # argparse
        found, out, err = error.code, "", ""
    assert found == status and said in out + err and "Traceback" not in err, out + err

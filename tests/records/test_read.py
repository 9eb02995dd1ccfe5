"""records/tools/read.py: synthetic logs of every family (golden/), special cases of public logs, inconsistent logs."""
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from record_common import GOLDEN, OTHER_SOURCE, events_of, make_run, sha256, write_events

from tools import read                                       # noqa: E402
from tools.read import Point, read_runs                      # noqa: E402

CONSOLE = [Point(1500, 3.65, 300.5), Point(2900, 3.2812, 580.5), Point(3000, 3.2785, 600.5)]
NODE = dict(hardware="NVIDIA H100 80GB HBM3 x 8", world_size=8)

def only(path: Path) -> read.Run:
    run, = read_runs([path]).runs
    return run

@pytest.mark.parametrize("name, kind, total, val, facts", [
    ("b_train_loss.txt", "text", 14, [Point(0, 16.0, None), Point(12, 5.5, 0.245), Point(14, 4.25, 0.487)],
     NODE | dict(torch="2.6.0.dev20241203+cu124", cuda="12.4")),
    ("c_nan.txt", "text", 14, [Point(0, 10.8258, None), Point(12, 5.0, 0.31), Point(14, 3.2788, 0.612)], {}),
    ("d_timing.txt", "text", 4, [Point(0, 10.826, 0.0), Point(2, 4.1, 0.121), Point(4, 3.2785, 0.331)],
     NODE | dict(torch="2.10.0.dev20251210+cu126", cuda="12.6")),
    ("e1_seconds.txt", "text", 3000, [Point(0, 10.82576, 0.0), Point(1500, 3.6, 255.125), Point(2720, 3.29, 462.5)],
     dict(hardware="NVIDIA H200 x 8")),
    ("e2_seconds_steps.txt", "text", 4, [Point(2, 6.5, 0.34), Point(4, 3.27912, 0.69)],
     dict(world_size=1, hardware="NVIDIA A100-SXM4-80GB x 1")),
    ("f_extra_keys.txt", "text", 3000, [Point(125, 4.5, 21.25), Point(3000, 3.278, 517.25)], {}),
    ("h_console.stdout", "text", 3000, CONSOLE, {}),
    ("i_one/final_val_loss.txt", "text", 3000, [Point(3000, 3.279, 700.0)], {})])
def test_read_file__each_family(name, kind, total, val, facts) -> None:
    """The logs begin with sources, which contain lines that look like results."""
    run = only(GOLDEN / name)
    assert (run.kind, run.total, run.val) == (kind, total, val)
    assert facts.items() <= run.facts.items()
    if facts:
        data = (GOLDEN / name).read_bytes().decode()
        source, _, _ = data.partition("\n" + "=" * 100)
        assert run.facts["source_sha256"] == sha256(source.strip())
    assert run.finished == (name != "e1_seconds.txt") and run.void is None
    assert ("timer restarts at step 11" in run.notes) == (name[0] in "bc")

def test_read_text__steps_and_their_training_losses() -> None:
    steps = only(GOLDEN / "b_train_loss.txt").steps
    assert np.isnan(steps[:10, 1]).all()
    assert steps[:10, 2] == pytest.approx([10 - n / 10 for n in range(1, 11)])
    assert steps[10:, :3].tolist() == [[11, 0.12, 8.9], [12, 0.24, 8.8], [13, 0.365, 8.7], [14, 0.485, 8.6]]
    run = only(GOLDEN / "d_timing.txt")
    assert run.steps[:, :2].tolist() == [[1, 0.061], [2, 0.118], [3, 0.18], [4, 0.24]]
    assert run.seconds == 0.331 and run.result["peak_memory_mib"] == {"allocated": 30573}

def test_split__runs_of_one_file() -> None:
    first, second = read_runs([GOLDEN / "g_trials.txt"]).runs
    assert (first.final, second.final) == (Point(3000, 3.2791, 521.5), Point(3000, 3.2802, 522.5))
    repeated = read_runs([GOLDEN / "g_repeated_stdout.txt"]).runs
    assert [run.loss for run in repeated] == [3.276, 3.277, 3.278], "blocks that repeat the end of a run are left out"
    assert not any(run.refused for run in repeated)

def test_split__a_block_that_begins_elsewhere_is_refused(tmp_path) -> None:
    """It counts as a started run. Otherwise a failed run behind a complete one would be hidden."""
    points = [(0, 7.0), (10, 5.0), (20, 4.0), (10, 4.9), (20, 3.0)]
    with open(tmp_path / "log.txt", "w") as log:
        for step, loss in points:
            log.write(f"step:{step}/20 val_loss:{loss} train_time:{100 * step}ms step_avg:100.00ms\n")
    first, second = read_runs([tmp_path]).runs
    assert (first.loss, first.refused) == (4.0, None) and "starts at step 10" in second.refused

def test_log_files__a_pipe_is_not_opened(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert "is not a regular file" in read_runs([tmp_path]).unread[0][1]

def test_split__two_final_lines_are_two_runs(tmp_path) -> None:
    line = "step:20/20 val_loss:{} train_time:{}ms step_avg:10.00ms\n"
    (tmp_path / "log.txt").write_text(line.format(4.0, 200) + line.format(3.0, 201))
    assert [run.loss for run in read_runs([tmp_path]).runs] == [4.0, 3.0]

NO_LINE = "no line of the form step:N/M val_loss:X"
NO_LOGS = {"manifest.jsonl": "no header line at the start"}
NO_LOGS |= dict.fromkeys(["binary.log", "empty.txt", "metadata.txt", "only_source.txt", "remote_manifest.txt",
                          "stderr.txt"], NO_LINE)

def test_read_runs__what_is_no_log_is_counted_by_reason() -> None:
    reading = read_runs([GOLDEN / "z_no_logs"])
    assert not reading.runs
    assert {path.name: why for path, why in reading.unread} == NO_LOGS
    assert reading.unread_in_words().startswith("7 files not read: 6 no line of the form step:N/M val_loss:X, ")

def test_read_runs__each_run_once_however_it_is_logged(tmp_path) -> None:
    """A copy, the console output and the final line of a run are duplicates. Seeds that print the same are not, and
    losses before training are alike.
    """
    run = make_run(tmp_path / "a/run", 0, 3.28, 80.0)
    (run / "checkpoints").mkdir()
    for beside in ("settings.json", "checkpoints/manifest.json"):
        shutil.copy(run / "log.jsonl", run / beside)
    shutil.copytree(run, tmp_path / "b/copy")
    text = (run / "log.txt").read_text()
    (tmp_path / "console.out").write_text(text)
    (tmp_path / "final.txt").write_text(text.splitlines()[-1] + "\n")
    make_run(tmp_path / "c/3", 3, 3.28000001, 80.0)
    for seed in (1, 2):
        log = make_run(tmp_path / f"c/{seed}", seed, 3.28, 80.0) / "log.jsonl"
        write_events(log, events_of(log)[:3])
    reading = read_runs([tmp_path])
    assert sorted(run.seed for run in reading.runs) == [0, 1, 2, 3]
    assert "3 duplicate run" in reading.unread_in_words()

def test_read_ours__a_whole_log() -> None:
    run = only(GOLDEN / "ours/done")
    assert (run.kind, run.seed, run.total) == ("ours", 5, 12)
    assert (run.finished, run.void, run.notes) == (True, None, [])
    assert run.val == [Point(0, 7.5, 0.0205), Point(6, 4.5, 0.6205), Point(12, 3.2765432109, 1.2205)]
    assert run.steps[:, :3].tolist() == [[n, (20.25 + 100 * n) / 1000, 5 - n / 10] for n in range(1, 13)]
    assert run.untimed_s["warm-up"] == 1.5005

def test_read_ours__torn_aborted_void_and_resumed() -> None:
    torn = only(GOLDEN / "ours/torn")
    assert torn.notes == ["last line incomplete", "no result yet: running or killed, at step 4"]
    aborted = only(GOLDEN / "ours/aborted")
    assert aborted.notes == ["interrupted at step 4: loss is nan at step 4"]
    assert not torn.finished and not aborted.finished
    void = only(GOLDEN / "ours/void")
    assert void.void == "profiled" and void.finished and void.seconds is None
    resumed = only(GOLDEN / "ours/resumed")
    assert resumed.finished and resumed.notes == ["resumed at step 6"]
    assert resumed.steps[:, 2].tolist() == [5 - n / 10 for n in range(1, 7)] + [1.0] * 6

OTHER = dict(source_sha256=sha256(OTHER_SOURCE), seed=4, torch="2.12.0", hardware="NVIDIA H200 x 8")

@pytest.mark.parametrize("differs", [*OTHER, "max_steps", "nothing"])
def test_take_event__a_resumed_run(tmp_path, differs) -> None:
    """One that was resumed with another source or seed, or elsewhere, is no run. One that was stopped by --max_steps
    and resumed to its end is complete.
    """
    folder = make_run(tmp_path / "run", 3, 3.28, 80.0)
    header, *events = events_of(folder / "log.jsonl")
    later = header | dict(type="resumed", step=5, source="logs/x", config=header["config"] | dict(max_steps=0))
    if differs == "max_steps":
        header["config"] = header["config"] | dict(max_steps=5)
    later |= {key: fact for key, fact in OTHER.items() if key == differs}
    write_events(folder / "log.jsonl", [header, *events[:7], later, *events[7:]])
    run = only(folder)
    assert run.finished and run.total == 10 and run.void is None and "resumed at step 5" in run.notes
    refused = f"resumed with another {differs}" if differs in OTHER else None
    assert run.refused == refused

def test_settings__by_row(tmp_path) -> None:
    config = dict(stages=[dict(lr_mul=1), dict(lr_mul=2)])
    run = only(make_run(tmp_path / "run", 0, 3.2, 80.0, config=config))
    assert {"stages[0] lr_mul": 1, "stages[1] lr_mul": 2}.items() <= run.settings.items()

@pytest.mark.parametrize("broken, why", [
    ('{"type": "step"}\n', "no header line at the start"), ("not json\n", "line 1 is not valid in a log.jsonl"),
    ('{"type": "header", "config": {}}\n{"type": "step"}\n', "line 2 is not valid in a log.jsonl"),
    ('{"type": "head', "no header line")])
def test_read_ours__what_is_none(tmp_path, broken, why) -> None:
    (tmp_path / "log.jsonl").write_text(broken)
    assert read_runs([tmp_path]).unread == [(tmp_path / "log.jsonl", why)]

def test_take__two_logs_in_one_file_are_no_run(tmp_path) -> None:
    logs = [make_run(tmp_path / str(seed), seed, 3.28 + seed, 80.0) / "log.jsonl" for seed in (0, 1)]
    both = tmp_path / "both.jsonl"
    write_events(both, [*events_of(logs[0]), *events_of(logs[1])])
    (path, reason), = read_runs([both]).unread
    assert path == both and reason.startswith("a second header line")

@pytest.mark.parametrize("result", [{}, {"void": None}])
@pytest.mark.parametrize("where, ms", [(-1, 79_000), (2, 90_000), (2, math.nan)])
def test_read_ours__no_time_of_a_clock_that_was_set_back(tmp_path, where, ms, result) -> None:
    folder = make_run(tmp_path / "run", 0, 3.28, 80.0, result=result)
    events = events_of(folder / "log.jsonl")
    for event in events[-2:] if where == -1 else events[where:where + 1]:
        event["train_time_ms"] = ms
    write_events(folder / "log.jsonl", events)
    run = only(folder)
    assert "clock was set back" in run.void and run.seconds is None and run.loss == 3.28

def test_read_block__a_clock_that_is_set_back_late(tmp_path) -> None:
    line = "step:{}/40 val_loss:4.0 train_time:{}ms step_avg:10.00ms\n"
    (tmp_path / "log.txt").write_text(line.format(20, 300) + line.format(40, 200))
    assert only(tmp_path).void == "its clock was set back at step 40"

"""records/tools/record.py: `new` creates records, `check` finds damage and manipulation, `table` ranks."""
import datetime
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from common import ROOT, full_disk, run

from record_common import (CONFIG, GONE_TABLE, NEW_NAMES, NEW_TABLE, NO_FLAGS, OLD_NAMES, OTHER_SOURCE, SOURCE,
                           bench_plan, call, edit, events_of, make_bench_run, make_peer, make_run, manifest_lines,
                           sha256, text_of, write_events, write_text, write_text_log)

from tools import files, page, record, stand                  # noqa: E402

LOSSES = (2.171, 2.144, 2.162)
SECONDS = (99.1, 97.7, 95.7)
CPU = dict(hardware="a CPU", world_size=1, all_phases=True)
FIRST = "2026-01-01_01_First"
SECOND = "2026-01-02_02_Second"

def make_runs(folder: Path, losses: Sequence[float] = LOSSES, seconds: Sequence[float] = SECONDS,
              **facts: object) -> Path:
    for seed, (loss, s) in enumerate(zip(losses, seconds)):
        make_run(folder / f"seed{seed}", seed, loss, s, **(CPU | facts))
    return folder

def new(root: Path, *argv: object) -> Path:
    """Call `new`, which must succeed; return the record directory."""
    status, out, error = call("new", "--records", root, *argv)
    assert status == 0, error
    return Path.cwd() / out.strip()

def check(root: Path, *argv: object) -> str:
    """Call `check`; return its findings, "" for none."""
    status, out, error = call("check", "--records", root, *argv)
    assert status == int("all numbers follow from their files" not in out), out + error
    return out if status else ""

def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())

def test_new__waits_for_another_call_and_then_refuses(tmp_path, monkeypatch) -> None:
    """Earlier, two calls at once shared a directory: one record had the log of one run and the numbers of another."""
    monkeypatch.setattr(record, "NEW_WAIT_S", 0.1)
    root = tmp_path / "records"
    root.mkdir()
    argv = ["new", "--records", root, "One", make_runs(tmp_path / "runs"), "--track=pocket"]
    with files.locked(root):
        status, _, error = call(*argv)
    assert status == 2 and "another process is using it" in error and not list(root.iterdir())
    assert call(*argv)[0] == 0

@pytest.fixture(scope="module")
def two_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An entry, and a comparison that has the entry as parent, a different source on one side, and a manifest."""
    place = tmp_path_factory.mktemp("records")
    root = place / "records"
    root.mkdir()
    new(root, "First", make_runs(place / "runs"), "--track=pocket", "--date=2026-01-01")
    lines = [bench_plan(dict(A=SOURCE, B=OTHER_SOURCE), 3)]
    for number, name in enumerate("ABBAAB", 1):
        pair = (number + 1) // 2
        loss = 2.15 + pair / 100
        source = SOURCE
        if name == "B":
            loss += 0.2
            source = OTHER_SOURCE
        lines += make_bench_run(place / "bench", number, pair, name, loss, 90 + number / 10, source, **CPU)
    lines += manifest_lines(7, 4, "B", "runs/007_B", OTHER_SOURCE, outcome="failed", cause="exit status 1")
    write_events(place / "bench/manifest.jsonl", lines)
    new(root, "Second", place / "bench", "--kind=comparison", "--parent=01", "--date=2026-01-02")
    (root / "README.md").write_text(f"[one]({FIRST}/README.md) and `[no link](here)`\n")
    (place / "README.md").write_text("[all](records/README.md#rules) and [web](https://example.org)\n")
    assert check(root) == ""
    return place

@pytest.fixture
def root(two_records: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_records, tmp_path / "copy")) / "records"

def test_check__records_of_this_repository() -> None:
    status, out, error = call("check")
    assert status == 0, out + error

def test_build__numbers_are_those_of_the_logs(two_records) -> None:
    result = result_of(two_records / "records" / FIRST)
    group = result["groups"][""]
    assert group["losses"] == list(LOSSES) and group["times"] == list(SECONDS)
    assert group["loss"]["mean"] == pytest.approx(np.mean(LOSSES))
    assert group["loss"]["sd"] == pytest.approx(np.std(LOSSES, ddof=1))
    assert result["class"] == "plain" and result["entry"]["params_total"] == 1000
    shown = (two_records / "records" / FIRST / "README.md").read_text()
    for part in ("2.1590", "| 1    | 2.1440, 97.7 |", "# 01 First: loss 2.159 (2.080 to 2.238) in 97.5 s"):
        assert part in shown
    second = two_records / "records" / SECOND
    result = result_of(second)
    verdict = result["verdicts"]["B"]
    assert verdict["verdict"] == "higher loss"
    assert verdict["loss"]["mean"] == pytest.approx(0.2)
    assert [line["folder"] for line in result["unfinished"]] == ["runs/007_B"]
    assert "007_B" in (second / "README.md").read_text()
    assert (second / "sources/B.diff").read_text().count("line_7 = 8") == 1

def test_generate__pages_are_short_and_do_not_repeat_numbers(two_records, chain) -> None:
    for folder in [*record.folders(two_records / "records"), *record.folders(chain / "records")]:
        generated, _ = page.split((folder / "README.md").read_text())
        assert max(map(len, generated.splitlines())) <= 160 and "{" not in generated
        losses = re.findall(r"\d\.\d{4}, \d", generated)
        assert len(losses) == len(result_of(folder)["runs"]), "each run once"

def test_numbers__untimed_phases_of_one_name_add_up(tmp_path) -> None:
    """Earlier, the last phase of a name replaced the others."""
    log = make_run(tmp_path / "run", 0, 2.2, 9.0, **CPU) / "log.jsonl"
    header, *events = events_of(log)
    write_events(log, [header, dict(type="phase", name="warm-up", ms=250.0, timed=False), *events])
    assert record.numbers(record.read_log(log))["untimed_s"]["warm-up"] == 5.25

def test_settings__one_row_per_setting(tmp_path) -> None:
    """Earlier, a page had both tables of stages as JSON in one row."""
    root = tmp_path / "records"
    root.mkdir()
    stages = [dict(batch_tokens=512, lr_mul=1.0), dict(batch_tokens=1024, lr_mul=1.5)]
    new(root, "Parent", make_runs(tmp_path / "a", config=dict(stages=stages)), "--kind=comparison")
    later = [dict(batch_tokens=512, lr_mul=2.0), stages[1], dict(batch_tokens=7)]
    runs = make_runs(tmp_path / "b", config=dict(stages=later))
    text = (new(root, "Child", runs, "--kind=comparison", "--parent=01") / "README.md").read_text()
    rows = [re.sub(" +", " ", line) for line in text.splitlines() if line.startswith("| stages")]
    assert rows == ["| stages[0] lr_mul | 1.0 | 2.0 |", "| stages[2] batch_tokens | | 7 |"]
    assert "**Changes from 01 Parent:** 2 settings" in text

def test_check__no_bench_whose_numbers_are_only_stated(root) -> None:
    """Earlier, the page copied the numbers of a bench from a verdict.json, and nothing computed them from logs."""
    folder = root / FIRST
    (folder / "bench").mkdir()
    found = dict(verdict="faster", reason="", time=None, loss=dict(mean=0.0, p=None), pairs=9, memory=None)
    found["share"] = dict(mean=-0.5, low=-0.6, high=-0.4)
    (folder / "bench/verdict.json").write_text(json.dumps(found))
    restate(folder, ["bench"], "bench")
    assert "result.json: found" in check(root, "01")
    new(root, "--update=01")
    assert check(root) == "" and "0.5" not in (folder / "README.md").read_text().splitlines()[0]
    assert "bench" not in {*result_of(folder), *result_of(folder)["stated"]}

def test_new__update_keeps_what_is_written_by_hand(root) -> None:
    edit(root / FIRST / "README.md", "The idea:\n", "The idea: fewer words.\n")
    before = (root / FIRST / "README.md").read_text()
    new(root, "--update=01")
    assert (root / FIRST / "README.md").read_text() == before and check(root) == ""

@pytest.mark.parametrize("argv, said", [
    (["X", "{runs}", "--track=pocket", "--date=1st"], "YYYY-MM-DD_nn"), (["Bad name", "{runs}"], "YYYY-MM-DD_nn"),
    (["X", "{root}"], "a run directory, or a directory of them"),
    (["X", "{runs}/seed1/log.jsonl"], "a run directory, or a directory of them"), (["X", "{runs}"], "track None"),
    (["X", "{runs}", "--track=8xGPU"], "8 on track 8xGPU"),
    (["X", "{runs}", "{runs}", "--track=pocket"], "each run once"),
    (["X", "{runs}", "{same_names}", "--track=pocket"], "a different name for each run"),
    (["X", "a={runs}", "b={other}", "--track=pocket", "--parent=09"], "give its directory name or its number"),
    (["X", "{runs}", "{other}", "--track=pocket"], "source_sha256")])
def test_new__what_is_no_record(root, tmp_path, argv, said) -> None:
    other = make_runs(tmp_path / "other", (2.2, 2.3, 2.4), source=OTHER_SOURCE)
    for number, run in enumerate(sorted(other.iterdir())):
        run.rename(run.with_name(f"other{number}"))
    same_names = make_runs(tmp_path / "same_names", (2.2, 2.3, 2.4))
    places = dict(root=root / "none", runs=make_runs(tmp_path / "runs"), other=other, same_names=same_names)
    before = sorted(root.rglob("*"))
    words = [word.format(**places) for word in argv]
    status, _, error = call("new", "--records", root, *words)
    assert status == 2 and said in error, error
    assert sorted(root.rglob("*")) == before, "a failed call leaves no files"

def test_new__removes_no_folder_that_it_did_not_create(root, tmp_path) -> None:
    for name in (".unfinished", ".unfinished-01234567"):
        (root / name).mkdir()
        (root / name / "notes.txt").write_text("mine\n")
    runs = make_runs(tmp_path / "runs")
    for argv in (["X", root / "none"], ["X", runs, "--track=pocket"]):
        _, _, error = call("new", "--records", root, *argv)
        assert [(root / name / "notes.txt").read_text() for name in (".unfinished", ".unfinished-01234567")] == [
            "mine\n", "mine\n"]
        assert error.count("is not removed") == 2 and f"{root}/.unfinished-01234567" in error
    assert check(root) == "" and (root / f"{datetime.date.today()}_03_X/result.json").exists()
    assert sorted(path.name for path in root.glob(".*")) == [".unfinished", ".unfinished-01234567"]

def test_new__the_hundredth_record(root, tmp_path) -> None:
    """Earlier, `new` refused it, and numbers were compared as text."""
    restate(root / SECOND, "99", "number")
    rename(root / SECOND, "2026-01-02_99_Second")
    runs = make_runs(tmp_path / "runs")
    flags = ["--track=pocket", "--date=2026-01-02"]
    names = [new(root, name, runs, *flags).name for name in ("Third", "Fourth")]
    assert names == ["2026-01-02_100_Third", "2026-01-02_101_Fourth"]
    assert check(root, "100") == "" == check(root, "101")
    assert [result["stated"]["number"] for result in record.entries_of(root)] == ["01", "100", "101"]
    entry = dict(kind="entry", track="pocket_time", name="X", date="2026-01-03", main="", idea="x",
                 groups={"": []})
    base = dict(record="2026-01-03_98_X", ratio=0.5, low=0.4, high=0.6)
    facts = result_of(root / FIRST) | dict(in_turn=dict(base=base))
    for number in ("98", "99", "100"):
        folder = tmp_path / f"chain/2026-01-03_{number}_X"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(facts | {"stated": entry | {"number": number}}))
    found = record.required_opponents(tmp_path / "chain", entry | dict(number="100", parent="2026-01-03_99_X"))
    assert {role: result["stated"]["number"] for role, result in found.items()} == dict(parent="99", base="98")

OUTSIDE = ("../x", "runs/../../x", "..", "", ".", "/tmp/x", "/", "//x", "link", "link/x", "runs/link/x", None, 7, ["x"],
           "a\0b")

@pytest.mark.parametrize("name", OUTSIDE)
def test_inside__refuses_what_is_not_below(tmp_path, name) -> None:
    folder = tmp_path / "folder"
    (folder / "runs/001").mkdir(parents=True)
    for link in (folder / "link", folder / "runs/link"):
        link.symlink_to(tmp_path)
    (folder / "within").symlink_to("runs")
    with pytest.raises(files.ToolError, match="a path below this directory"):
        files.inside(folder, name)
    for good in ("runs", "runs/001", "./runs/none/yet", "within/001", "..x/a..b"):
        assert files.inside(folder, good) == folder / good

@pytest.mark.parametrize("name", ["../../../../../d1/d2/d3/d4/b", "../b", ".", "", None, "{bench}", "link/b"])
def test_new__a_manifest_that_names_a_folder_elsewhere(tmp_path, name) -> None:
    """Earlier, its "folder" was joined to the directory of the logs: they were written five levels above the records.
    """
    root = tmp_path / "e1/e2/e3/e4/records"
    root.mkdir(parents=True)
    bench = make_run(tmp_path / "d1/d2/d3/d4/b", 1, 2.2, 90.0, **CPU)
    folder = name and name.format(bench=bench)
    end = dict(type="end", run=1, pair=1, side="A", folder=folder, cause="", outcome="done")
    write_events(bench / "manifest.jsonl", [dict(type="bench", pairs=1, sides=NO_FLAGS), end])
    (bench / "link").symlink_to(root)
    before = sorted(tmp_path.rglob("*"))
    for argv in (["show", bench], ["compare", bench, bench],
                 ["new", "--records", root, "X", bench, "--kind=comparison"]):   # `new` is last, because it writes
        status, _, error = call(*argv)
        assert status == 2 and "expected: a path below this directory" in error, error
    assert sorted(tmp_path.rglob("*")) == before

def test_new__a_manifest_whose_side_is_a_path(root, tmp_path) -> None:
    bench = tmp_path / "bench"
    lines = [dict(type="bench", pairs=1, sides=NO_FLAGS)]
    for number, (side, source) in enumerate((("A", SOURCE), ("../../escaped", OTHER_SOURCE)), 1):
        make_run(bench / f"runs/{number}", number, 2.2, 90.0, source=source, **CPU)
        lines.append(dict(type="end", run=number, pair=1, side=side, folder=f"runs/{number}", cause="", outcome="done"))
    write_events(bench / "manifest.jsonl", lines)
    before = sorted(tmp_path.rglob("*"))
    status, _, error = call("new", "--records", root, "X", bench, "--kind=comparison")
    assert status == 2 and "../../escaped" in error and sorted(tmp_path.rglob("*")) == before

@pytest.mark.parametrize("which, value, keys", [
    (FIRST, ["../../../runs/seed0", "seed1", "seed2"], ("groups", "")), (FIRST, ["../seed0"], ("groups", "")),
    (FIRST, ["out/seed0"], ("groups", "")), (FIRST, [["seed0"]], ("groups", "")),
    (SECOND, "../elsewhere", ("parent",)), (SECOND, "/tmp", ("parent",)), (FIRST, "../../x", ("name",))])
def test_check__a_result_that_names_paths_elsewhere(root, monkeypatch, which, value, keys) -> None:
    """Neither `check` nor `new --update` opens a file outside of the records."""
    shutil.copytree(root / FIRST, root.parent / "elsewhere")
    if value == ["out/seed0"]:
        (root / FIRST / "logs/out").symlink_to(root.parent / "runs")
        with pytest.raises(files.ToolError, match="a path below this directory"):
            record.log_of(root / FIRST, "out/seed0")
    restate(root / which, value, *keys)
    opened = []
    monkeypatch.setattr(files, "read_bytes", noted_paths(files.read_bytes, opened))
    monkeypatch.setattr(record, "text", noted_paths(record.text, opened))
    assert check(root, which)
    call("new", "--records", root, f"--update={which}")
    outside = [path for path in opened if not path.resolve().is_relative_to(root)]
    assert opened and not outside

@pytest.mark.parametrize("name", ["README.md", "result.json", "train_gpt.py", "logs/seed1/log.txt.gz", "logs/seed1"])
def test_check__opens_no_file_through_a_link_out_of_the_record(root, monkeypatch, name) -> None:
    path = root / FIRST / name
    path.rename(root.parent / "elsewhere")
    path.symlink_to(root.parent / "elsewhere")
    opened = []
    monkeypatch.setattr(files, "read_bytes", noted_paths(files.read_bytes, opened))
    monkeypatch.setattr(record, "text", noted_paths(record.text, opened))
    assert f"{name}: a link out of the record" in check(root, FIRST)
    status, _, error = call("new", "--records", root, "--update=01")
    assert status == 2 and "link" in error and path.is_symlink()
    assert not [one for one in opened if not one.resolve().is_relative_to(root)]

def noted_paths(call: Callable[[Path], Any], opened: list[Path]) -> Callable[[Path], Any]:
    """Wrap a function of a path, and append each path to `opened`."""
    def noting(path: Path) -> Any:
        opened.append(path)
        return call(path)
    return noting

def test_write__never_through_a_link(root, tmp_path) -> None:
    """A link at the path of a plot, page or result is replaced, even if it leads to a file in the same directory."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    run = make_run(tmp_path / "run", 0, 2.2, 90.0, **CPU)
    (run / "loss.svg").symlink_to("../precious")
    (tmp_path / "picture.svg").symlink_to("precious")
    call("stand", run)
    call("show", run, f"--plot={tmp_path}/picture.svg")
    folder = root / FIRST
    (folder / "page").write_bytes((folder / "README.md").read_bytes())
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to("page")
    before = (folder / "page").read_bytes()
    edit(folder / "logs/seed1/log.txt", "seed 1", "seed 1 ")
    call("new", "--records", root, "--update=01")
    assert precious.read_text() == "precious" and (folder / "page").read_bytes() == before
    for picture in (run / "loss.svg", tmp_path / "picture.svg"):
        assert not picture.is_symlink() and picture.read_text().startswith("<svg ")

@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_write_bytes__what_is_no_file_stays(tmp_path, make) -> None:
    make(tmp_path / "name")
    before = (tmp_path / "name").lstat()
    with pytest.raises(files.ToolError, match="a directory, a pipe or a device"):
        files.write_bytes(tmp_path / "name", b"x")
    assert (tmp_path / "name").lstat()[:3] == before[:3] and len(list(tmp_path.iterdir())) == 1

def test_write_bytes__a_failure_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "name").write_text("old")
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError):
        files.write_bytes(tmp_path / "name", b"new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]

def remove(path: Path) -> None:
    path = files.stored(path)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()

def rename(path: Path, name: str) -> None:
    path.rename(path.with_name(name))

PAGE_SAID = "README.md: found"
ADD = Path.write_text, "more\n"
DAMAGES = {                                  # the finding, the file, how it is damaged
    "a number of the page": (PAGE_SAID, "README.md", edit, "2.159", "2.151"),
    "a time": (PAGE_SAID, "README.md", edit, "97.7", "96.7"),
    "a mean": ("result.json: found", "result.json", edit, "2.159", "2.158"),
    "a stranger's key": ("result.json: found", "result.json", edit, '"target": null', '"target": null, "more": 1'),
    "the mark": (PAGE_SAID, "README.md", edit, "<!-- end of what", "<!-- the end of what"),
    "a cut page": (PAGE_SAID, "README.md", edit, "[logs](logs)", "logs"),
    "the first mark": (PAGE_SAID, "README.md", edit, "<!-- what follows", "<!-- all that follows"),
    "a final loss": ("seed1", "logs/seed1/log.jsonl", edit, '"val_loss": 2.144', '"val_loss": 2.134'),
    "a training loss": ("edited", "logs/seed1/log.jsonl", edit, '"train_loss": 4.9', '"train_loss": 4.8'),
    "no log": ("seed1", "logs/seed1/log.jsonl", remove), "no log.txt": ("seed1", "logs/seed1/log.txt", remove),
    "no run": ("seed2", "logs/seed2", remove), "no source": ("train_gpt.py", "train_gpt.py", remove),
    "no picture": ("loss.svg", "loss.svg", remove), "no page": ("README.md", "README.md", remove),
    "no result": ("result.json", "result.json", remove),
    "another source": ("not the source", "train_gpt.py", edit, "= 7", "= 6"),
    "a stranger's file": ("notes.txt: added", "logs/notes.txt", *ADD), "a hidden file": ("added", ".hidden", *ADD),
    "a picture": ("loss.svg: edited", "loss.svg", *ADD),
    "a name": ("directory name: expected", "", rename, "2026-01-01_01_Best"),
    "a number twice": ("several records", "", rename, "2026-01-01_02_First"),
    "a date": ("directory name: expected", "result.json", edit, '"2026-01-01"', '"2026-01-03"'),
}

@pytest.mark.parametrize("name", DAMAGES)
def test_check__damage_is_named(root, name) -> None:
    said, where, act, *given = DAMAGES[name]
    act(root / FIRST / where, *given)
    assert said in check(root)

OLD = "".join(f"{n}\n" for n in range(30))
SOURCES = {"equal": (OLD, OLD), "changed": (OLD, OLD.replace("7\n", "8\n")), "emptied": (OLD, ""), "filled": ("", OLD),
           "first and last line": (OLD, "x\n" + OLD[2:] + "y\n"), "no line end": (OLD, OLD[:-1]),
           "a line end": (OLD[:-1], OLD), "neither has one": (OLD[:-1], OLD[2:-1]),
           "deleted": (OLD, OLD[:20] + OLD[40:]), "other line ends": (OLD, OLD.replace("5\n", "5\r\n6\f\u2028\r7\n")),
           "markers": (OLD, "--- a\n+++ b\n@@ -1 @@\n")}

@pytest.mark.parametrize("name", SOURCES)
def test_patched__inverts_diff_of_as_git_does(tmp_path, name) -> None:
    old, new = SOURCES[name]
    diff = record.diff_of(old, new)
    assert record.patched(old, diff) == new
    if diff:
        (tmp_path / "train_gpt.py").write_bytes(old.encode())
        done = subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, capture_output=True, timeout=60)
        assert done.returncode == 0 and (tmp_path / "train_gpt.py").read_bytes() == new.encode(), done.stderr

def reword(folder: Path, name: str, old: str, new: str) -> None:
    """Edit a file of a record, and its hash in result.json."""
    edit(folder / name, old, new)
    result = result_of(folder)
    result["files"][name] = files.sha256(folder / name)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")

@pytest.mark.parametrize("name, old, new, said", [
    ("sources/B.diff", "+line_7 = 8", "+line_7 = 9", "not the source of group B, expected [\"f1fb174a\"]"),
    ("sources/B.diff", "-line_7 = 7", "-line_7 = 0", "sources/B.diff: found lines that are not those of the sources"),
    ("loss.svg", "polyline", "polygon", "loss.svg: found")])
def test_check__a_source_and_a_picture_whose_hashes_are_edited(root, name, old, new, said) -> None:
    """Earlier, nothing compared the source of another group with its logs, or the picture with a new one."""
    reword(root / SECOND, name, old, new)
    found = check(root, "02")
    assert said in found and "edited" not in found, found
    status, _, error = call("new", "--records", root, "--update=02")
    assert (status, said in error) == ((0, False) if name == "loss.svg" else (2, True))

@pytest.mark.parametrize("said, where, act, given", [
    ("B.diff: edited", "sources/B.diff", edit, ("+line_7 = 8", "+line_7 = 9")),
    ("B.diff: missing", "sources", remove, ()), ("006_B", "logs/runs/006_B", remove, ()),
    ("manifest.jsonl", "logs/manifest.jsonl", edit, ('"failed"', '"lost"'))])
def test_check__damage_of_a_comparison_is_named(root, said, where, act, given) -> None:
    act(root / SECOND / where, *given)
    assert said in check(root)

def set_facts(logs: Path, seeds: Sequence[int], kinds: str = "", facts: Mapping = {}, scale: float = 1.0) -> None:
    """Change facts of events of these types in each log.jsonl, and scale all times; log.txt does not change."""
    for seed in seeds:
        log = logs / f"seed{seed}/log.jsonl"
        events = events_of(log)
        for event in events:
            if "train_time_ms" in event:
                event["train_time_ms"] *= scale
            if event["type"] in kinds.split():
                event |= facts
        write_events(log, events)

def restate(folder: Path, value: object, *keys: str) -> None:
    """Change what result.json states under nested keys."""
    result = result_of(folder)
    holder = result["stated"]
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")

def copy_run(folder: Path) -> None:
    """Add a second seed that is a copy, with its seed changed everywhere."""
    copy = Path(shutil.copytree(folder / "logs/seed1", folder / "logs/seed5"))
    lines = text_of(copy / "log.jsonl")
    write_text(copy / "log.jsonl", lines.replace('"seed": 1', '"seed": 5'))
    edit(copy / "log.txt", "seed 1", "seed 5")
    restate(folder, ["seed0", "seed1", "seed2", "seed5"], "groups", "")

def link_out(folder: Path) -> None:
    log = folder / "logs/seed1/log.jsonl.gz"
    log.rename(folder.parent / "elsewhere.jsonl.gz")
    log.symlink_to("../../../elsewhere.jsonl.gz")

def future(folder: Path) -> None:
    day = str(datetime.date.today() + datetime.timedelta(days=9))
    restate(folder, day, "date")
    rename(folder, f"{day}_01_First")

ALL = range(3)
LAUNDERED = {                                # the file, how it is manipulated
    "better losses": ("logs", set_facts, ALL, "val result", dict(val_loss=2.1)),
    "better result": ("logs", set_facts, [2], "result", dict(val_loss=2.1)),
    "nan": ("logs", set_facts, [1], "val", dict(val_loss=math.nan)),
    "times": ("logs", set_facts, ALL, "", {}, 0.9), "times of one": ("logs", set_facts, [0], "", {}, 0.9),
    "seed": ("logs", set_facts, [1], "header", dict(seed=9)),
    "hardware": ("logs", set_facts, ALL, "header", dict(hardware="a better CPU")),
    "hardware of one": ("logs", set_facts, [1], "header", dict(hardware="a better CPU")),
    "a loss in log.txt": ("logs/seed1/log.txt", edit, "val_loss:2.1440", "val_loss:2.1340"),
    "a time in log.txt": ("logs/seed1/log.txt", edit, "2.1440 train_time:97700ms", "2.1440 train_time:96700ms"),
    "a copied run": ("", copy_run), "a link": ("", link_out), "a day to come": ("", future),
    "a run out of its group": ("", restate, ["seed0", "seed1"], "groups", ""),
    "another track": ("", restate, "8xGPU", "track"),
    "stated over logged": ("", restate, 1, "entry", "params_total"),
}

@pytest.mark.parametrize("name", LAUNDERED)
def test_doubts__laundering_is_found(root, name) -> None:
    where, act, *given = LAUNDERED[name]
    act(root / FIRST / where, *given)
    call("new", "--records", root, "--update=01")
    assert check(root), "`new --update` must not hide the fault"

@pytest.mark.parametrize("key", ["pair", "outcome", "side", "source_sha256"])
def test_doubts__a_manifest_that_lacks_a_key(root, key) -> None:
    """Earlier, `new` ended with the KeyError, which did not name the manifest."""
    path = root / SECOND / "logs/manifest.jsonl"
    events = events_of(path)
    for event in events:
        event.pop(key, None)
    write_events(path, events)
    status, _, error = call("new", "--records", root, "--update=02")
    assert status == 2 and f"manifest.jsonl: found KeyError: '{key}', expected the lines that" in error, error
    assert f"manifest.jsonl: found KeyError: '{key}'" in check(root, "02")

def test_doubts__a_run_of_the_manifest_cannot_be_left_out(root) -> None:
    shutil.rmtree(root / SECOND / "logs/runs/006_B")
    restate(root / SECOND, ["runs/002_B", "runs/003_B"], "groups", "B")
    status, _, error = call("new", "--records", root, "--update=02")
    assert status == 2 and "runs/006_B succeeded and is left out" in error

def test_check__runs_no_program_of_a_foreign_folder(root, tmp_path, monkeypatch) -> None:
    """Earlier, `git log` in such a directory executed the programs that its .git/config names."""
    (tmp_path / "bin").mkdir()
    git = tmp_path / "bin/git"
    git.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    git.chmod(0o755)
    (root.parent / ".git").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert check(root) == "" and not (tmp_path / "ran").exists()

def seal(folder: Path) -> str:
    """Add the hashes of a sealed record to result.json, and return the sha256 of this file."""
    result = result_of(folder) | {"files": record.hashes(folder), "sealed": record.sealed(folder)}
    (folder / "result.json").write_text(json.dumps(result))
    return sha256(json.dumps(result))

def test_findings__no_record_can_seal_itself(root) -> None:
    """Earlier, every record with a key `sealed` passed, whatever its numbers were and without its logs."""
    edit(root / FIRST / "result.json", '"mean": 2.159', '"mean": 1.9')
    seal(root / FIRST)
    found = check(root, "01")
    assert """result.json: found '    "mean": 1.9,', expected '    "mean": 2.159,'""" in found, found
    remove(root / FIRST / "logs")
    seal(root / FIRST)
    assert f"log {root / FIRST}/logs/seed0/log.jsonl" in check(root, "01")

def test_findings__a_sealed_record(root, monkeypatch) -> None:
    monkeypatch.setitem(record.SEALED, FIRST, seal(root / FIRST))
    status, out, _ = call("check", "--records", root)
    assert (status, out) == (0, "1 record: all numbers follow from their files\n"
                                "1 sealed record: all files have the stored hashes\n")
    assert call("check", "--records", root, "01")[1] == "1 sealed record: all files have the stored hashes\n"
    assert "found:    sealed" in call("new", "--records", root, "--update=01")[2]
    for name, old, other in (("README.md", "2.159", "2.151"), ("logs/seed1/log.txt", "2.1440", "2.1340"),
                             ("result.json", '"class": "plain"', '"class": "table"')):
        path = root / FIRST / name
        edit(path, old, other)
        assert f"{path.name}: edited" in call("check", "--records", root, "01")[1]
        edit(path, other, old)

@pytest.mark.parametrize("settings, expected", [
    (dict(vocab_size=100, bigram_rows=1000), "plain"), (dict(vocab_size=100, bigram_rows=1001), "table"),
    (dict(vocab_size=100, bigram_rows=5, tables=[dict(rows=10**6)]), "table"), (dict(vocab_size=100), None),
    (dict(vocab_size=100, **OLD_NAMES), "table"), (dict(vocab_size=500, **OLD_NAMES), "plain"),
    (dict(vocab_size=100, **NEW_NAMES), "table"), (dict(vocab_size=500, **NEW_NAMES), "plain")])
def test_class_of__from_the_configuration(settings, expected) -> None:
    """Earlier, the class was taken from the table rows of the header, which can be empty."""
    assert record.class_of(settings) == expected

SLOWER_TABLE = NEW_TABLE | dict(update_every=4)

@pytest.mark.parametrize("parent, child, changed", [
    (OLD_NAMES, NEW_NAMES, {}), (OLD_NAMES, OLD_NAMES, {}), (NEW_NAMES, OLD_NAMES, {}),
    (OLD_NAMES, NEW_NAMES | dict(seqs_per_step=4), dict(seqs_per_step=[8, 4])),
    (OLD_NAMES, NEW_NAMES | dict(tables=[SLOWER_TABLE]), dict(tables=[[GONE_TABLE], [GONE_TABLE | SLOWER_TABLE]])),
    (OLD_NAMES | dict(time_budget=60.0), NEW_NAMES, dict(time_budget=[60.0, 0.0])),
    (OLD_NAMES, OLD_NAMES | dict(num_slots=4), dict(num_slots=[8, 4]))])
def test_build__settings_have_the_names_of_their_logs(tmp_path, parent, child, changed) -> None:
    """A record states settings under the names of its logs, so older records do not change.

    A rename is not listed as a change from the parent.
    """
    root = tmp_path / "records"
    root.mkdir()
    new(root, "Parent", make_runs(tmp_path / "parent", config=parent), "--kind=comparison", "--date=2026-01-01")
    runs = make_runs(tmp_path / "child", config=child)
    result = result_of(new(root, "Child", runs, "--kind=comparison", "--date=2026-01-02", "--parent=01"))
    assert child.items() <= result["config"].items() and result["changed"] == changed
    assert check(root) == ""

POOLS = [                                    # name, loss, seconds, rows of the bigram table
    ("Base", 3.278, 90.0, 500), ("Fast", 3.279, 80.0, 500), ("Unproven", 3.281, 70.0, 500),
    ("Tables", 3.270, 60.0, 5000),
]

def test_table__ranks_proven_entries_by_class(tmp_path) -> None:
    root = tmp_path / "records"
    root.mkdir()
    for day, (name, loss, seconds, rows) in enumerate(POOLS, 1):
        losses = loss, loss - 0.0002, loss + 0.0002
        times = seconds, seconds + 0.1, seconds + 0.2
        config = dict(val_tokens=10_485_760, bigram_rows=rows)
        runs = make_runs(tmp_path / name, losses, times, world_size=8, config=config)
        new(root, name, runs, "--track=8xGPU", f"--date=2026-01-0{day}")
    lists = json.loads(call("table", "--records", root, "--json")[1])
    assert len(lists) == 2
    plain, = (rows for title, rows in lists.items() if "track 8xGPU, class plain" in title)
    ranks = {row["record"][3:]: row["rank"] for row in plain}
    assert ranks == {"Unproven": None, "Fast": 1, "Base": 2}
    status, said, _ = call("table", "--records", root)
    assert status == 0 and "class table" in said and said.index("02 Fast") < said.index("01 Base")
    status, _, error = call("table", "--records", root, f"--plot={tmp_path}/chain.svg")
    assert status == 2 and "no chain in" in error

def test_new__a_run_of_the_trainer_as_it_is(tmp_path) -> None:
    """The tools read the same results from its log.txt and its log.jsonl."""
    runs = [run(tmp_path / f"runs/{seed}", f"--seed={seed}", "--max_steps=2", "--sample_tokens=0") for seed in (1, 2)]
    assert [done.status for done in runs] == [0, 0], runs[0].err
    root = tmp_path / "records"
    root.mkdir()
    new(root, "Tiny", tmp_path / "runs", "--kind=comparison")
    assert check(root) == ""

def test_in_log__choices_of_the_run_and_its_checkpoints(tmp_path) -> None:
    """Earlier, --head=auto contradicted the precision in the header."""
    runs = make_runs(tmp_path / "runs", config=dict(head="auto", attention="auto"), head="fp8", attention="FA3")
    for folder in runs.iterdir():
        header, *events = events_of(folder / "log.jsonl")
        saved = dict(type="phase", name="checkpoint at step 4", ms=900.0, timed=False)
        write_events(folder / "log.jsonl", [header, *events[:6], saved, *events[6:]])
        write_text_log(folder)
    root = tmp_path / "records"
    root.mkdir()
    new(root, "Gpu", runs, "--kind=comparison")
    assert check(root) == ""

def test_consistency__a_last_step_that_is_too_large(root, tmp_path) -> None:
    """Earlier, `check` built a list of all steps, and ended with a MemoryError."""
    for settings in ({}, {"val_every": 1}):
        run = make_run(tmp_path / f"large{len(settings)}", 0, 2.2, 90.0, config=settings, **CPU)
        events = events_of(run / "log.jsonl")
        events[-2]["step"] = events[-1]["steps"] = 10**13
        events[0]["config"]["num_scheduled_steps"] = 10**13
        write_events(run / "log.jsonl", events)
        status, _, error = call("new", "--records", root, "X", run, "--kind=comparison")
        assert status == 2 and "training lines: found 10 lines, expected one line for each step" in error, error
        assert ("steps of its validations" in error) == bool(settings), error

ALONE = "nats per token; for comparison: no record has"

@pytest.mark.parametrize("losses, facts, words", [
    ([2.21], {}, "2.210 nats per token; for comparison: record 01 2.159, inside its 99 % band 2.00 to 2.32"),
    ([2.34], {}, "2.340 nats per token; for comparison: record 01 2.159, outside its 99 % band 2.00 to 2.32"),
    ([2.2, 2.22], {}, "2.210 nats per token, mean of 2 runs; for comparison: record 01 2.159, inside its 99 % band"),
    ([2.21], dict(data_sha256="e" * 64), f"2.210 {ALONE}"), ([2.21], dict(config={"val_tokens": 131_072}), ALONE),
    ([2.21], dict(preset="pocket_tables"), ALONE), ([2.21], dict(result={"tokens": 1024}), ALONE)])
def test_stand__compares_with_the_latest_entry_of_its_data(root, tmp_path, monkeypatch, losses, facts, words) -> None:
    """`stand` does not import scipy. The band by Student's t is 2.159 +- 0.0137 x 9.925 x sqrt(1/3 + 1/runs)."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    runs = make_runs(tmp_path / "runs", losses, SECONDS, **facts)
    status, out, error = call("stand", "--records", root, runs)
    assert status == 0 and words in out and "trigram" not in out, out + error
    assert f"picture: {runs / 'loss.svg'}" in out and (runs / "loss.svg").exists()

@pytest.mark.parametrize("entropy, trained, said", [
    (None, 3000, "unigram entropy {unigram_nats:.3f}, trigram model of 3,000 training tokens {trigram_nats:.3f}"),
    (None, 50_000, "trigram model of 5,000 training tokens"), (2.5, 3000, "for comparison: unigram entropy 2.500\n")])
def test_stand__any_text_has_a_unigram_and_a_trigram_model(root, tmp_path, entropy, trained, said) -> None:
    """Earlier, the line had no number for a text that no record has. Other files than those of the run do not count."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 5000), ("val", 400)):
        header = np.zeros(256, "<i4")
        header[:5] = 20240520, 1, count, 100, 1
        (tmp_path / f"my_{name}_0.bin").write_bytes(
            header.tobytes() + rng.binomial(99, 0.5, count).astype("<u2").tobytes())
    patterns = {f"{name}_files": str(tmp_path / f"my_{name}_*.bin") for name in ("train", "val")}
    result = dict(tokens=trained) | ({"unigram_nats": entropy} if entropy else {})
    run = make_run(tmp_path / "run", 0, 2.2, 9.0, config=dict(val_tokens=300, **patterns), result=result)
    _, out, error = call("stand", "--records", root, run)
    command = [sys.executable, ROOT / "data/ngram.py", *(f"--{key.removesuffix('_files')}={pattern}"
               for key, pattern in patterns.items()), "--train_tokens=3000", "--val_tokens=300"]
    numbers = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert said.format(**numbers) in out, out + error

def test_stand__a_text_of_one_repeated_token(root, tmp_path, monkeypatch) -> None:
    """Earlier, its unigram entropy of 0 ended in ZeroDivisionError."""
    counted = dict(unigram_nats=0.0, train_tokens=9, trigram_nats=0.0)
    monkeypatch.setattr(stand, "trigram_model", lambda run: counted)
    run = make_run(tmp_path / "run", 0, 0.1, 9.0, result=dict(unigram_nats=0.0))
    status, out, error = call("stand", "--records", root, run)
    assert status == 0 and "trigram model of 9 training tokens 0.000" in out, out + error

def test_stand__a_text_log(root, tmp_path) -> None:
    """Earlier: KeyError 'config'."""
    log = make_peer(tmp_path / "peer.txt", 3.279, 80.0)
    status, out, error = call("stand", "--records", root, log)
    assert status == 0 and out.startswith("3.279 nats per token; for comparison: no record has"), out + error
    assert (tmp_path / "loss.svg").exists()

def test_stand__brackets_in_a_directory_name_are_literal(root, tmp_path) -> None:
    """Brackets are literal if the directory exists, as in the trainer. Earlier, the trigram model was left out."""
    folder = tmp_path / "my [data]"
    folder.mkdir()
    header = np.zeros(256, "<i4")
    header[:5] = 20240520, 1, 900, 100, 1
    for name in ("train", "val"):
        (folder / f"{name}_0.bin").write_bytes(header.tobytes() + np.arange(900, dtype="<u2").clip(max=99).tobytes())
    patterns = {f"{name}_files": f"{folder}/{name}_*.bin" for name in ("train", "val")}
    run = make_run(tmp_path / "run", 0, 2.2, 9.0, config=dict(val_tokens=300, **patterns), result=dict(tokens=900))
    status, out, error = call("stand", "--records", root, run)
    assert status == 0 and "trigram model of 900 training tokens" in out, out + error

def test_stand__a_run_that_is_not_finished(root, tmp_path) -> None:
    run = make_run(tmp_path / "run", 0, 2.2, 9.0)
    write_events(run / "log.jsonl", events_of(run / "log.jsonl")[:-1])
    status, out, error = call("stand", "--records", root, run)
    assert (status, out) == (2, "") and "no result yet" in error

CHAIN_CONFIG = dict(val_every=5, compile=1, train_files="data/pocket/train_*.bin", val_files="data/pocket/val_*.bin")
RECORD_OF_CHAIN = dict(data_sha256=record.POCKET_DATA, hardware="a CPU, 2 cores, 2 threads", world_size=1,
                       config=CHAIN_CONFIG, all_phases=True)

def bench_runs(place: Path, sources: dict[str, str], seconds: dict[str, float], loss: dict[str, float],
               pairs: int = 6) -> Path:
    """Write a bench as `records bench` does: interleaved sides, A B then B A, a manifest, one seed per pair."""
    lines = [bench_plan(sources, pairs)]
    order = [*sources, *reversed(sources)]
    for number in range(1, len(sources) * pairs + 1):
        side, pair = order[(number - 1) % len(order)], 1 + (number - 1) // len(sources)
        lines += make_bench_run(place, number, pair, side, loss[side] + pair / 1000 + number / 1e5,
                                seconds[side] * (1 + (pair % 3) / 1000), sources[side], **RECORD_OF_CHAIN)
    write_events(place / "manifest.jsonl", lines)
    return place

THIRD_SOURCE = SOURCE.replace("= 9\n", "= 99\n").replace("= 7\n", "= 8\n")
BASE, PARENT = dict(seconds=100.0, loss=2.16), dict(seconds=80.0, loss=2.17)

@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three entries: the base, one interleaved with it, and one interleaved with that one and with the base."""
    place = tmp_path_factory.mktemp("chain")
    root = place / "records"
    root.mkdir()
    track = "--track=pocket_time"
    for seed in range(6):
        make_run(place / f"base/seed{seed}", seed, 2.16 + seed / 1000, 100.0 + seed / 10, **RECORD_OF_CHAIN)
    new(root, "Base", place / "base", track, "--date=2026-01-01", "--idea=recipe A, fewest steps")
    bench = bench_runs(place / "with_base", {"A": SOURCE, "B": OTHER_SOURCE}, {"A": 100.0, "B": 80.0},
                       {"A": 2.16, "B": 2.17})
    new(root, "Eight", bench, track, "--date=2026-01-02", "--parent=01", "--idea=eight for seven")
    third = [bench_runs(place / "third_with_parent", {"A": OTHER_SOURCE, "B": THIRD_SOURCE}, {"A": 80.0, "B": 60.0},
                        {"A": 2.17, "B": 2.18}),
             bench_runs(place / "third_with_base", {"A": SOURCE, "B": THIRD_SOURCE}, {"A": 101.0, "B": 59.0},
                        {"A": 2.16, "B": 2.1805})]
    new(root, "NinetyNine", *third, track, "--date=2026-01-03", "--parent=02", "--idea=ninety nine for nine")
    assert check(root) == ""
    return place

def test_chain__ratios_are_those_of_the_benches(chain) -> None:
    (title, rows), = json.loads(call("table", "--records", chain / "records", "--json")[1]).items()
    assert title == "track pocket_time, class plain" and {row["class"] for row in rows} == {"plain"}
    assert [row["idea"] for row in rows] == ["recipe A, fewest steps", "eight for seven", "ninety nine for nine"]
    assert [row.get("ratio_to_parent") for row in rows] == [None, pytest.approx(0.8), pytest.approx(0.75)]
    assert [row.get("ratio_to_base") for row in rows] == [None, pytest.approx(0.8), pytest.approx(59 / 101)]
    assert {fact for key, fact in rows[0].items() if "ratio" in key or "diff" in key} == {None}, "no ratios"
    assert [row["n"] for row in rows] == [6, 6, 6] and [row.get("diff_lines") for row in rows] == [None, 2, 2]
    shown = (chain / "records/2026-01-03_03_NinetyNine/README.md").read_text()
    assert "class plain: ninety nine for nine." in shown and "base [2026-01-01_01_Base]" in shown
    assert shown.startswith("# 03 NinetyNine: 0.584 of the base's time (")
    assert "), 0.750 of 02's (" in shown.splitlines()[0]
    assert "**Changes from 02 Eight:** 0 settings, [2 lines of source](source.diff)." in shown
    runs, = re.findall(r"<details><summary>Every run.*?</details>", shown, re.S)
    assert runs.count("\n| ") == 14, "a head, a rule, and one row per seed and bench"

def test_chain__picture(chain, tmp_path) -> None:
    picture = tmp_path / "chain.svg"
    status, said, _ = call("table", "--records", chain / "records", f"--plot={picture}")
    assert status == 0 and "eight for seven" in said
    texts = [element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert [name for name in texts if name[:2] in ("01", "02", "03")] == [
        "01 recipe A, fewest steps", "02 eight for seven", "03 ninety nine for nine"]
    assert any(re.fullmatch(r"0\.584 \(0\.5\d+ to 0\.5\d+\)", name) for name in texts), texts
    assert "Target: mean loss below 2.20 nats per token" in texts and "class table" in texts

def test_chain__place_compares_a_run_with_runs_of_its_source(chain, tmp_path) -> None:
    """A record of a chain also contains runs of base and parent, which have other times."""
    its = chain / "records/2026-01-03_03_NinetyNine"
    alone = make_run(tmp_path / "run", 77, 2.18, 60.0, source=THIRD_SOURCE, **RECORD_OF_CHAIN)
    _, said, _ = call("place", alone, its, "--json")
    found = json.loads(said)
    assert found["verdict"] == "inside" and not [note for note in found["notes"] if "mixes" in note]
    assert found["pool_runs"] == len(result_of(its)["stated"]["groups"][""])
    stranger = make_run(tmp_path / "stranger", 77, 2.18, 60.0, source="other = 1\n", **RECORD_OF_CHAIN)
    assert "mixes source_sha256" in json.loads(call("place", stranger, its, "--json")[1])["reason"]

def without_third(chain: Path, tmp_path: Path) -> Path:
    """Copy the records of the chain without the third entry."""
    root = Path(shutil.copytree(chain / "records", tmp_path / "records"))
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    return root

def new_third(root: Path, *runs: object) -> tuple[int, str]:
    """Call `new` for a third entry; return exit status and stderr."""
    status, _, error = call("new", "--records", root, "X", *runs, "--track=pocket_time", "--idea=x", "--parent=02",
                            "--date=2026-01-03")
    return status, error

def all_of_chain(place: Path, sides: Mapping[str, str], pairs: int = 6) -> Path:
    """Write a bench of base A, `parent` and further sides; each side takes less time than the one before."""
    seconds = {name: 100.0 - 20 * index for index, name in enumerate(sides)}
    return bench_runs(place, dict(sides), seconds, dict.fromkeys(sides, 2.17), pairs)

THREE = dict(A=SOURCE, parent=OTHER_SOURCE, idea=SOURCE.replace("= 9\n", "= 99\n"))

def test_chain__no_times_without_the_manifest(chain, tmp_path) -> None:
    """Earlier, the best 6 of 10 rounds, copied without the manifest, made an entry; so did `--update` without it."""
    root = without_third(chain, tmp_path)
    bench = all_of_chain(tmp_path / "bench", THREE, 8)
    (bench / "manifest.jsonl").unlink()
    chosen = [path for path in sorted(bench.glob("runs/*")) if int(path.name[:3]) > 6]
    for path in chosen:
        (path / "logs/x").rename(path / f"logs/{path.name}")
    status, error = new_third(root, *chosen)
    assert status == 2 and error.count("no bench has runs of both") == 2, error
    remove(root / EIGHT / "logs/with_base/manifest.jsonl")
    leave_out(root / EIGHT, "001_A", "002_B")
    assert call("new", "--records", root, "--update=02")[0] == 2
    assert "no bench has runs of both" in check(root, "02")

def test_chain__runs_outside_the_bench_change_no_ratio(chain, tmp_path) -> None:
    """Earlier, one run of the parent outside the bench raised the level from 0.00025 to 0.007."""
    bench = all_of_chain(tmp_path / "bench", THREE, 10)
    edit(bench / "manifest.jsonl", '"pairs": 10', '"pairs": 6')
    more = tmp_path / "more"
    make_run(more / "parent", 70, 2.171, 200.0, source=OTHER_SOURCE, **RECORD_OF_CHAIN)
    make_run(more / "own", 71, 2.172, 10.0, source=THREE["idea"], **RECORD_OF_CHAIN)
    found = []
    for number, items in enumerate(([bench], [bench, more])):
        root = without_third(chain, tmp_path / str(number))
        status, error = new_third(root, *items)
        assert status == 0, error
        found.append(result_of(root / "2026-01-03_03_X")["in_turn"])
    assert found[0] == found[1] and found[0]["parent"]["pairs"] == 10

def test_chain__each_ratio_comes_from_one_bench(chain, tmp_path) -> None:
    """Earlier, runs of several benches were merged without a correction."""
    root = without_third(chain, tmp_path)
    benches = [all_of_chain(tmp_path / "one", THREE), all_of_chain(tmp_path / "two", THREE, 4)]
    for run_dir in benches[1].glob("runs/*/logs/x"):
        shift_seed(run_dir, 100)
    rewritten = [line | dict(command=line["command"].replace("--seed=", "--seed=10")) if "command" in line else line
                 for line in events_of(benches[1] / "manifest.jsonl")]
    rewritten[0]["sides"] = {name: side | dict(flags=["--seed=10{seed}"])
                             for name, side in rewritten[0]["sides"].items()}
    write_events(benches[1] / "manifest.jsonl", rewritten)
    status, error = new_third(root, *benches)
    assert status == 2 and error.count("found runs of 2 benches, ") == 2, error

def shift_seed(run_dir: Path, by: int) -> None:
    """Change the seed, and losses and times so that the run is not recognized as a copy."""
    events = events_of(run_dir / "log.jsonl")
    events[0]["seed"] += by
    for event in events:
        for key in ("val_loss", "train_loss"):
            if key in event:
                event[key] += by / 1e5
    write_events(run_dir / "log.jsonl", events)
    write_text_log(run_dir)

@pytest.mark.parametrize("side", [*THREE])
def test_chain__an_interrupted_run_makes_no_entry(chain, tmp_path, side) -> None:
    """Earlier, a slow pair could be interrupted: "8 of 10 started", and the verdict was still `faster`."""
    root = without_third(chain, tmp_path)
    bench = all_of_chain(tmp_path / "bench", THREE)
    failed = manifest_lines(19, 7, side, f"runs/019_{side}", THREE[side], outcome="interrupted", cause="interrupted")
    write_events(bench / "manifest.jsonl", [*events_of(bench / "manifest.jsonl"), *failed])
    status, error = new_third(root, bench)
    assert status == 2 and "partly proven: 0." in error, error

@pytest.mark.parametrize("arm, said", [
    ("idea", "several runs in one pair"), ("A", "several runs in one pair"), (None, "succeeded and is left out")])
def test_chain__equal_arms(chain, tmp_path, arm, said) -> None:
    """Earlier, the best of 8 equal arms was false in 2.2 %; the slowest of several equal bases could be chosen."""
    root = without_third(chain, tmp_path)
    sides = THREE | dict(again=THREE[arm or "idea"])
    bench = all_of_chain(tmp_path / "bench", sides)
    runs = [path for path in sorted(bench.glob("runs/*")) if arm or not path.name.endswith("_again")]
    status, error = new_third(root, *runs)
    assert status == 2 and said in error, error

@pytest.mark.parametrize("losses, said", [
    ([2.171, 2.185, 2.195, 2.16, 2.175, 2.187], "this test has a level of 0.0015"),
    ([2.1 + seed / 1e4 for seed in range(21)], "at most 20"), ([2.17] * 4 + [2.171], "")])
def test_chain__the_proof_holds_after_each_seed(tmp_path, losses, said) -> None:
    """Earlier, p < 0.01 over as many seeds as that takes: 4.9 % of false proofs in up to 20 seeds."""
    for seed, loss in enumerate(losses):
        make_run(tmp_path / f"runs/{seed}", seed, loss, 100.0 + seed, **RECORD_OF_CHAIN)
    root = tmp_path / "records"
    root.mkdir()
    status, _, error = call("new", "--records", root, "X", tmp_path / "runs", "--track=pocket_time", "--idea=x")
    assert (status == 2) == bool(said), error
    assert not said or "target: found mean loss" in error and said in error, error

@pytest.mark.parametrize("facts, said", [
    (dict(config=CHAIN_CONFIG | dict(vocab_size=200)), "vocab_size: found 200, expected 100, as in the base"),
    (dict(config=CHAIN_CONFIG | dict(seqs_per_step=8, val_batch_tokens=512)), "per validation sequence: found 64"),
    (dict(seed=None), "does not state its seed"),
    (dict(config=CHAIN_CONFIG | dict(checkpoint_every=1)), "not comparable: 0.")])
def test_chain__settings_of_an_entry(chain, tmp_path, facts, said) -> None:
    """Earlier, validations with another packing, and checkpoints of one side were not noticed."""
    root = without_third(chain, tmp_path)
    bench = all_of_chain(tmp_path / "bench", THREE)
    for run_dir in bench.glob("runs/*_idea/logs/x"):
        events = events_of(run_dir / "log.jsonl")
        if "seed" in facts:
            del events[0]["seed"]
        events[0]["config"] |= facts.get("config", {})
        events[-1] |= facts.get("result", {})
        write_events(run_dir / "log.jsonl", events)
    status, error = new_third(root, bench)
    assert status == 2 and said in error, error

def test_doubts__a_resumed_run(tmp_path) -> None:
    """Earlier, a run that was resumed with the same source was part of a record with times."""
    runs = make_runs(tmp_path / "runs")
    log = runs / "seed1/log.jsonl"
    header, *events = events_of(log)
    write_events(log, [header, *events[:6], header | dict(type="resumed", step=1), *events[6:]])
    root = tmp_path / "records"
    root.mkdir()
    status, _, error = call("new", "--records", root, "X", runs, "--track=pocket")
    assert status == 2 and "valid times that was not resumed" in error and "resumed at step 1" in error, error

def test_slow_evaluations__relative_to_the_parent(chain, tmp_path) -> None:
    """Earlier, the limit was twice the base's, which is longer than the training of a late entry."""
    root = without_third(chain, tmp_path)
    bench = all_of_chain(tmp_path / "bench", THREE)
    for side, ms in (("parent", 1000.0), ("idea", 2500.0)):
        for run_dir in bench.glob(f"runs/*_{side}/logs/x"):
            events = [event | dict(ms=ms) if event.get("name") == "evaluation" else event
                      for event in events_of(run_dir / "log.jsonl")]
            write_events(run_dir / "log.jsonl", events)
            write_text_log(run_dir)
    status, error = new_third(root, bench)
    assert status == 2 and "phase evaluation: found 2.5 s, expected at most 2.0 s, twice the parent's" in error, error

def test_head__says_that_intervals_are_not_corrected(tmp_path) -> None:
    """The title has the lowest of several losses."""
    root = tmp_path / "records"
    root.mkdir()
    groups = []
    for name, loss in (("baseline", 2.3), ("one", 2.2), ("two", 2.1)):
        groups.append(f"{name}={make_runs(tmp_path / name, (loss, loss + 0.01, loss + 0.02), config=dict(lr=loss))}")
    text = (new(root, "Groups", *groups, "--kind=comparison") / "README.md").read_text()
    assert "two (lowest loss of 2) less baseline" in text
    assert "count. The title has 99 % intervals, not corrected for the choice of one of 2 comparisons." in text

def of_chain(folder: Path, seeds: int = 6, loss: float = 2.17, **facts: object) -> Path:
    """Write runs that fit the track of the chain."""
    for seed in range(seeds):
        make_run(folder / f"seed{seed}", seed, loss + seed / 1000, 100.0, **RECORD_OF_CHAIN | facts)
    return folder

@pytest.mark.parametrize("runs, argv, said", [
    (dict(seeds=4), [], "over 5 seeds or more"), (dict(loss=2.21), [], "against 2.2: not below it"),
    (dict(data_sha256="e" * 64), [], f"{record.POCKET_DATA} on track pocket_time"),
    (dict(hardware="a CPU, 4 cores, 4 threads"), [], "2 on track pocket_time"),
    (dict(world_size=2), [], "2 on track pocket_time"), (dict(config={"val_tokens": 1024}), [], "65536 on track"),
    (dict(config={"vocab_size": None}), [], "plain or table"),
    ({}, ["--idea=one two three four five six"], "one to 5 words"), ({}, ["--idea="], "one to 5 words")])
def test_chain__what_is_no_entry(tmp_path, runs, argv, said) -> None:
    folder = of_chain(tmp_path / "runs", **runs)
    root = tmp_path / "records"
    root.mkdir()
    status, _, error = call("new", "--records", root, "X", folder, "--track=pocket_time", "--idea=x", *argv)
    assert status == 2 and said in error, error

@pytest.mark.parametrize("benches, parent, said", [
    (["slower"], "01", "slower: 1.01 ("), (["third_with_parent"], "02", "relative to the base, 2026-01-01_01_Base"),
    (["third_with_base"], "02", "relative to the parent, 2026-01-02_02_Eight"),
    (["third_with_parent", "third_with_base"], "01", "mixes source_sha256"),
    (["with_base"], None, "choose it with --parent"),
    (["no_bench"], "01", "no bench contains")])
def test_chain__no_entry_without_a_verdict_faster(chain, tmp_path, benches, parent, said) -> None:
    root = shutil.copytree(chain / "records", tmp_path / "records")
    bench_runs(tmp_path / "slower", {"A": SOURCE, "B": THIRD_SOURCE}, {"A": 100.0, "B": 101.0}, {"A": 2.16, "B": 2.17})
    of_chain(tmp_path / "no_bench", source=THIRD_SOURCE)
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    places = [next(path for path in (tmp_path / name, chain / name) if path.exists()) for name in benches]
    flags = [f"--parent={parent}"] if parent else []
    status, _, error = call("new", "--records", root, "X", *places, "--track=pocket_time", "--idea=x", *flags)
    assert status == 2 and said in error, error

def test_chain__one_bench_has_sides_of_several_links(chain, tmp_path) -> None:
    root = shutil.copytree(chain / "records", tmp_path / "records")
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    sources = {"A": SOURCE, "parent": OTHER_SOURCE, "idea": THIRD_SOURCE, "next": THIRD_SOURCE.replace("99", "999")}
    bench = bench_runs(tmp_path / "all", sources, {"A": 100.0, "parent": 80.0, "idea": 60.0, "next": 50.0},
                       dict.fromkeys(sources, 2.17))
    own = [path for path in sorted(bench.glob("runs/*")) if not path.name.endswith("next")]
    flags = ["--track=pocket_time", "--idea=x", "--parent=02", "--date=2026-01-03"]
    status, _, error = call("new", "--records", root, "X", *own[:-1], *flags)
    assert status == 2 and "succeeded and is left out" in error, error
    folder = new(root, "X", *own, *flags)
    assert check(root) == ""
    ratios = {role: its["ratio"] for role, its in result_of(folder)["in_turn"].items()}
    assert ratios == {"parent": pytest.approx(0.75), "base": pytest.approx(0.6)}

def test_new__a_bench_is_stored_in_one_record(chain, tmp_path) -> None:
    """The first record of a bench has the runs of all sides; a later one names them, and has no logs of its own."""
    root = without_third(chain, tmp_path)
    sides = THREE | dict(next=THREE["idea"].replace("= 8\n", "= 88\n"))
    bench = all_of_chain(tmp_path / "with_base", sides)
    runs = sorted(bench.glob("runs/*"))
    status, error = new_third(root, *(run for run in runs if not run.name.endswith("next")))
    assert status == 0, error
    third = root / "2026-01-03_03_X"
    assert len(list(third.glob("logs/with_base/runs/*_next/log.jsonl.gz"))) == 6, "the side of a later record"

    flags = ["--track=pocket_time", "--idea=y", "--parent=03", "--date=2026-01-04"]
    fourth = new(root, "Y", *(run for run in runs if not run.name.endswith("parent")), *flags)
    assert check(root) == "" and not (fourth / "logs").exists()
    groups = result_of(fourth)["stated"]["groups"]
    assert [*map(len, groups.values())] == [6, 6, 6]
    assert all(name.startswith("2026-01-03_03_X/with_base/runs/") for names in groups.values() for name in names)
    assert "[Source](train_gpt.py), [parent](../2026-01-03_03_X/README.md), [logs in 03](../2026-01-03_03_X/logs)" in (
        fourth / "README.md").read_text()
    ratios = {role: its["ratio"] for role, its in result_of(fourth)["in_turn"].items()}
    assert ratios == {"parent": pytest.approx(40 / 60), "base": pytest.approx(0.4)}

    # An edit of a log is found in both records, and `new` does not take a run for the stored one if it differs.
    set_events(third, "*_next", "*", FASTER)
    assert "train_s of manifest.jsonl" in check(root, "04") and "edited" in check(root, "03")
    assert "_next, train_s of manifest.jsonl" in check(root, "03"), "earlier, no log of another side was read"
    set_events(third, "*_idea", "*", FASTER)
    shutil.rmtree(fourth)
    status, _, error = call("new", "--records", root, "Y", *runs, *flags)
    assert status == 2 and "03_X/logs/with_base/runs/003_idea has another log" in error, error

def test_new__copies_no_foreign_file_as_a_log(chain, tmp_path) -> None:
    """Earlier, the log of another side could be a link, and `new` copied any file to which it leads."""
    root = without_third(chain, tmp_path)
    bench = all_of_chain(tmp_path / "bench", THREE | dict(next=THREE["idea"].replace("= 8\n", "= 88\n")))
    log = bench / "runs/004_next/logs/x/log.jsonl"
    log.unlink()
    log.symlink_to(tmp_path / "private")
    (tmp_path / "private").write_text("private\n")
    runs = [path for path in sorted(bench.glob("runs/*")) if not path.name.endswith("next")]
    status, error = new_third(root, *runs)
    assert status == 2 and f"log {log}\n" in error and "the log of one run" in error, error

def test_new__names_runs_that_a_record_has(root) -> None:
    """Earlier, their logs were copied, so that two records had them."""
    again = new(root, "Again", root / FIRST, "--track=pocket", "--date=2026-01-03")
    assert check(root) == "" and not (again / "logs").exists()
    assert result_of(again)["stated"]["groups"] == {"": [f"{FIRST}/seed{seed}" for seed in range(3)]}

def test_new__a_bench_whose_name_is_one_of_a_record(chain, tmp_path) -> None:
    """Earlier: "No such file", because its runs were taken for runs of that record."""
    status, error = new_third(without_third(chain, tmp_path), all_of_chain(tmp_path / "2026-01-01_01_Base", THREE))
    assert status == 2 and "begins with the name of a record" in error and "rename the directory" in error, error

def test_new__a_bench_without_a_log_of_another_side(chain, tmp_path) -> None:
    """Earlier, `new` left this run out, and no later record could be made of its side."""
    root = without_third(chain, tmp_path)
    bench = all_of_chain(tmp_path / "bench", THREE | dict(next=THREE["idea"].replace("= 8\n", "= 88\n")))
    runs = [path for path in sorted(bench.glob("runs/*")) if not path.name.endswith("next")]
    shutil.rmtree(bench / "runs/004_next")
    status, error = new_third(root, *runs)
    assert status == 2 and f"run runs/004_next of {bench}/manifest.jsonl" in error and "no log.jsonl" in error, error

@pytest.mark.parametrize("text", ["", "{}", "[]", '{"stated": 1}', '{"stated": {"kind": "entry", "number": "x"}}'])
def test_load__one_damaged_record_does_not_stop_the_others(chain, tmp_path, text) -> None:
    """Earlier, `table` and `stand`, and `check` and `new` for each entry of a chain, ended with KeyError 'stated'."""
    root = Path(shutil.copytree(chain / "records", tmp_path / "records"))
    third = root / "2026-01-03_03_NinetyNine"
    (third / "result.json").write_text(text)
    run_dir = make_run(tmp_path / "run", 0, 2.2, 9.0)
    assert check(root, "01", "02") == "" and third.name in check(root)
    for argv in (["table"], ["table", "--json"], ["stand", run_dir], ["new", "--update=02"]):
        status, out, error = call(argv[0], "--records", root, *argv[1:])
        assert status == 0 and f"note: a record is left out: {third.name}/result.json" in error, out + error

@pytest.mark.parametrize("key", ["class", "groups"])
def test_table__a_record_that_lacks_a_number(chain, tmp_path, key) -> None:
    """`check` names the record, and `table` says that `check` does so."""
    root = Path(shutil.copytree(chain / "records", tmp_path / "records"))
    third = root / "2026-01-03_03_NinetyNine"
    facts = result_of(third)
    del facts[key]
    (third / "result.json").write_text(json.dumps(facts))
    status, _, error = call("table", "--records", root)
    assert status == 2 and f"KeyError: '{key}'" in error and "python records check names damaged records" in error
    assert third.name in check(root)

@pytest.mark.parametrize("name", ["mine/logs", "2026-01-09_09_Empty/logs", "9lives"])
def test_load__a_directory_that_is_no_record(chain, tmp_path, name) -> None:
    """Earlier, it ended `table`, `stand`, `new`, and `check` of each entry of a chain."""
    root = Path(shutil.copytree(chain / "records", tmp_path / "records"))
    (root / name).mkdir(parents=True)
    (root / name / "README.md").write_text("mine\n")
    assert check(root, "01", "02", "03") == ""
    assert "result.json\n  found:    no file" in check(root)
    status, _, error = call("table", "--records", root)
    assert status == 0 and "move the directory if it is no record" in error, error

def test_required_opponents__names_the_record_to_restore(chain, tmp_path) -> None:
    """Earlier, the entry after a missing base was taken as the base, and a damaged parent was a KeyError."""
    root = Path(shutil.copytree(chain / "records", tmp_path / "records"))
    (root / EIGHT / "result.json").write_text("{}")
    assert f"{EIGHT}/result.json\n  found:    KeyError: 'stated'" in check(root, "03")
    shutil.copy(chain / "records" / EIGHT / "result.json", root / EIGHT)
    shutil.rmtree(root / "2026-01-01_01_Base")
    assert "base of the chain" in check(root, "03") and "restore 2026-01-01_01_Base" in check(root, "03")

def test_stand__without_the_logs_of_the_record(root, tmp_path) -> None:
    """Earlier, `stand` ended without the loss of the run."""
    remove(root / FIRST / "logs/seed1/log.jsonl")
    status, out, error = call("stand", "--records", root, make_runs(tmp_path / "runs", [2.21]))
    assert status == 0 and out.startswith("2.210 nats per token"), out + error
    assert "note: record 01 is left out: log " in error, error

@pytest.mark.parametrize("name", ["2026-01-01_01_Base/../../run", "2026-01-09_09_None/run", "2026-01-01_01_Link/run"])
def test_log_of__no_log_outside_of_the_records(chain, tmp_path, name) -> None:
    root = without_third(chain, tmp_path)
    make_run(tmp_path / "run", 0, 2.16, 100.0, **RECORD_OF_CHAIN)
    make_run(tmp_path / "elsewhere/logs/run", 0, 2.16, 100.0, **RECORD_OF_CHAIN)
    (root / "2026-01-01_01_Link").symlink_to(tmp_path / "elsewhere")
    restate(root / EIGHT, [name], "groups", "")
    assert "a path below this directory" in check(root, "02") or "No such file" in check(root, "02")

EIGHT = "2026-01-02_02_Eight"
EVERY, OURS = "*", "*_B"                     # patterns of run directories: all of the bench, those of the entry

def rewrite(folder: Path, which: str, change: Callable[[list[dict]], list[dict]], with_text: bool = True) -> None:
    """Change the events of some runs of record 02 in log.jsonl, and write log.txt from them."""
    for run_dir in sorted((folder / "logs/with_base/runs").glob(which)):
        write_events(run_dir / "log.jsonl", change(events_of(run_dir / "log.jsonl")))
        if with_text:
            write_text_log(run_dir)

def set_events(folder: Path, which: str, kind: str, facts: Mapping, with_text: bool = True) -> None:
    """Change facts of all events of one type; "*" for all types. A callable computes the new value from the old one."""
    def change(events: list[dict]) -> list[dict]:
        for event in events:
            for key, value in facts.items():
                if key in event and kind in ("*", event["type"]):
                    event[key] = value(event[key]) if callable(value) else value
        return events
    rewrite(folder, which, change, with_text)

def add_to_events(folder: Path, kind: str, facts: Mapping, header: Mapping = {}) -> None:
    """Add facts to the events of one type of all runs, and others to their headers."""
    def change(events: list[dict]) -> list[dict]:
        events[0] |= header
        return [event | facts if event["type"] == kind else event for event in events]
    rewrite(folder, EVERY, change)

def set_config(folder: Path, which: str, settings: Mapping) -> None:
    def change(config: dict) -> dict:
        return config | settings
    set_events(folder, which, "header", dict(config=change))

def set_phase(folder: Path, name: str, ms: float, with_text: bool = True) -> None:
    def change(events: list[dict]) -> list[dict]:
        return [event | dict(ms=ms) if event.get("name") == name else event for event in events]
    rewrite(folder, OURS, change, with_text)

def cut(folder: Path, kind: str, *keys: object) -> None:
    """Remove events of one type from both logs of all runs; with a key and a value, only those that have it."""
    def change(events: list[dict]) -> list[dict]:
        return [event for event in events if event["type"] != kind or keys and event[keys[0]] != keys[1]]
    rewrite(folder, EVERY, change)

def rewrite_manifest(folder: Path, change: Callable[[list[dict]], list[dict]]) -> None:
    path = folder / "logs/with_base/manifest.jsonl"
    write_events(path, change(events_of(path)))

def exchange(folder: Path, one: str, other: str) -> None:
    """Exchange the logs of two runs."""
    runs = folder / "logs/with_base/runs"
    (runs / one).rename(runs / "between")
    (runs / other).rename(runs / one)
    (runs / "between").rename(runs / other)

def cut_first_round(folder: Path, renumber: bool = False) -> None:
    """Remove the first pair, and renumber the pairs, and optionally the runs."""
    def change(events: list[dict]) -> list[dict]:
        kept = [event for event in events if event.get("pair") != 1]
        for event in kept[1:]:
            event["pair"] -= 1
            event["run"] -= 2 * renumber
        return kept
    rewrite_manifest(folder, change)
    leave_out(folder, "001_A", "002_B")

def cut_third_pair(folder: Path) -> None:
    """Remove the third pair, and renumber the runs after it."""
    def change(events: list[dict]) -> list[dict]:
        kept = [event for event in events if event.get("pair") != 3]
        for event in kept[1:]:
            event["run"] -= 2 * (event["pair"] > 3)
        return [kept[0] | dict(pairs=5), *kept[1:]]
    rewrite_manifest(folder, change)
    leave_out(folder, "005_A", "006_B")

def cut_last_pair(folder: Path) -> None:
    def change(events: list[dict]) -> list[dict]:
        return [events[0] | dict(pairs=5), *(event for event in events[1:] if event["pair"] < 6)]
    rewrite_manifest(folder, change)
    leave_out(folder, "011_B", "012_A")

def move_third_pair(folder: Path) -> None:
    """State that the third pair is one of other sides, which no record needs."""
    def change(events: list[dict]) -> list[dict]:
        sides = events[0]["sides"]
        for name in [*sides]:
            sides[f"other{name}"] = sides[name] | dict(source_sha256=sha256(name))
        events[0]["pairs"] = 5
        for event in events[1:]:
            if event["pair"] == 3:
                event |= dict(side=f"other{event['side']}", source_sha256=sha256(event["side"]))
        return events
    rewrite_manifest(folder, change)
    for label, runs in result_of(folder)["stated"]["groups"].items():
        restate(folder, [run for run in runs if not re.search("005_A|006_B", run)], "groups", label)

def leave_out(folder: Path, *names: str) -> None:
    """Remove runs and their names in result.json."""
    for name in names:
        remove(folder / "logs/with_base/runs" / name)
    groups = result_of(folder)["stated"]["groups"]
    kept = {label: [run for run in runs if Path(run).name not in names] for label, runs in groups.items()}
    restate(folder, kept, "groups")

def call_failed(folder: Path, name: str, delete: bool) -> None:
    """State in the manifest that a run failed."""
    def change(events: list[dict]) -> list[dict]:
        for event in events:
            if event["type"] == "end" and event["folder"] == f"runs/{name}":
                for key in ("val_loss", "train_s"):
                    del event[key]
                event |= dict(outcome="failed", cause="exit status 1")
        return events
    rewrite_manifest(folder, change)
    if delete:
        leave_out(folder, name)

def exchange_source(folder: Path) -> None:
    """State another source in the logs of the entry and in the lines of its runs, but not in the plan."""
    digest = sha256(THIRD_SOURCE)

    def change(events: list[dict]) -> list[dict]:
        for event in events[1:]:
            if event["side"] == "B":
                event["source_sha256"] = digest
        return events
    set_events(folder, OURS, "header", dict(source_sha256=digest))
    rewrite_manifest(folder, change)
    (folder / "train_gpt.py").write_text(THIRD_SOURCE)

def another_phase(folder: Path) -> None:
    def change(events: list[dict]) -> list[dict]:
        return [*events[:2], dict(type="phase", name="counting n-grams of the text", ms=3e4, timed=False), *events[2:]]
    rewrite(folder, OURS, change)

def clone(folder: Path) -> None:
    """Add a copy of a run under another seed, with a better time and loss, outside of the bench."""
    copy = Path(shutil.copytree(folder / "logs/with_base/runs/002_B", folder / "logs/more"))
    events = events_of(copy / "log.jsonl")
    events[0] |= dict(seed=70)
    for event in events:
        if "val_loss" in event:
            event["val_loss"] -= 0.001
        if "train_time_ms" in event:
            event["train_time_ms"] *= 0.99
    write_events(copy / "log.jsonl", events)
    write_text_log(copy)
    restate(folder, [*result_of(folder)["stated"]["groups"][""], "more"], "groups", "")

def reordered(events: list[dict]) -> list[dict]:
    """Exchange the first two runs of a manifest."""
    return [events[0], *events[3:5], *events[1:3], *events[5:]]

def without_starts(events: list[dict]) -> list[dict]:
    return [event for event in events if event["type"] != "start"]

def replanned(events: list[dict]) -> list[dict]:
    return [events[0] | dict(pairs=10), *events[1:]]

def set_lines(folder: Path, run: int, facts: Mapping) -> None:
    """Change facts of the lines of one run in the manifest that have them."""
    def change(events: list[dict]) -> list[dict]:
        for event in events:
            if event.get("run") == run:
                event |= {key: fact for key, fact in facts.items() if key in event}
        return events
    rewrite_manifest(folder, change)

def shortened(ms: float) -> float:
    return 0.8 * ms

def lowered(loss: float) -> float:
    return loss - 0.05

def relabel(folder: Path) -> None:
    """State that runs of the entry are those of the base, and the other way round, for one pair."""
    groups = result_of(folder)["stated"]["groups"]
    groups["01"][0], groups[""][0] = groups[""][0], groups["01"][0]
    restate(folder, groups, "groups")

def edit_file(folder: Path, name: str, old: str, new: str) -> None:
    edit(folder / name, old, new)

FEW_TOKENS = CONFIG | CHAIN_CONFIG | dict(val_tokens=1024)
FASTER = dict(train_time_ms=shortened)
FINAL_TIME, FINAL_LOSS = "train_s of manifest.jsonl", "val_loss of manifest.jsonl"
EDITS = {                                    # as numbered in the closing note: the finding, and how record 02 is edited
    "1 times in both logs": (FINAL_TIME, set_events, OURS, "*", FASTER),
    "2 times in log.jsonl": ("of log.txt: found loss", set_events, OURS, "*", FASTER, False),
    "3 losses in both logs": (FINAL_LOSS, set_events, OURS, "*", dict(val_loss=lowered)),
    "5 first round cut": ("run 1: found start line of run 3", cut_first_round),
    "5 first round cut, runs renumbered": ("ends with the planned flags: --seed=1", cut_first_round, True),
    "5 third pair cut": ("manifest.jsonl, pairs: found [1, 2, 4, 5, 6], expected 1 to 5", cut_third_pair),
    "5 third pair moved to other sides": ("pair 3: found runs of ['otherA', 'otherB'], expected one", move_third_pair),
    "6 run deleted": ("runs/002_B succeeded and is left out", leave_out, "002_B"),
    "7 run deleted and called failed": ("after a run of this pair that was not done", call_failed, "003_B", True),
    "8 run called failed": ("failed, although its log has a result", call_failed, "012_A", False),
    "9 sides exchanged in a pair": ("source_sha256 of manifest.jsonl", exchange, "001_A", "002_B"),
    "9 sides exchanged in result.json": ("in the group of record 01, but have another source", relabel),
    "10 runs exchanged between pairs": ("002_B, seed: found 2", exchange, "002_B", "003_B"),
    "11 start": ("002_B, start: found 2031", set_events, OURS, "header", dict(started="2031-01-01T12:00:00")),
    "12 torch": ("mixed torch", set_events, OURS, "header", dict(torch="2.14.0")),
    "13 threads": ("mixed hardware", set_events, OURS, "header", dict(hardware="a CPU, 4 cores, 2 threads")),
    "14 data": ("mixed data_sha256", set_events, OURS, "header", dict(data_sha256="e" * 64)),
    "15 long evaluation": ("002_B, phase evaluation: found 60.0 s", set_phase, "evaluation", 6e4),
    "16 evaluation in log.jsonl": ("phases of log.txt: found evaluation 3.00 s", set_phase, "evaluation", 13.0, False),
    "17 another phase": ("untimed phase: found 'counting n-grams of the text', 30.0 s", another_phase),
    "19 memory": ("memory, expected 'peak memory consumption: 500", set_events, OURS, "result",
                  dict(peak_memory_mib={"consumption": 500}), False),
    "20 validation cut": ("steps of its validations: found [5, 10]", cut, "val", "step", 0),
    "20 compiled cut": ("line `compiled`: found None graphs", cut, "compiled"),
    "21 training lines cut": ("training lines: found 9 lines", cut, "step", "step", 4),
    "22 source": ("not the source", edit_file, "train_gpt.py", "= 8", "= 6"),
    "23 source and its hashes": (f"expected source {sha256(OTHER_SOURCE)[:8]}, as planned", exchange_source),
    "24 rows of a table": ("rows of table bigram_embed: found 500000", set_events, OURS, "header",
                           dict(table_rows={"bigram_embed": 500_000})),
    "25 copied run": ("training losses of 002_B", clone),
    "26 start lines cut": ("run 1: found start line of run None", rewrite_manifest, without_starts),
    "28 phases cut": ("phases: found []", cut, "phase"),
    "29 validation text": ("mixed val_files", set_config, OURS, dict(val_files="data/pocket/train_*.bin")),
    "29 in all runs": ("they have the source of record 01, but val_files", set_config, EVERY,
                       dict(val_files="data/pocket/train_*.bin")),
    "30 not compiled": ("what compile=0 implies", set_config, OURS, dict(compile=0)),
    "31 order": ("run 1: found start line of run 2", rewrite_manifest, reordered),
    "32 ratio": ("result.json: found", edit_file, "result.json", '"ratio": 0.', '"ratio": 0.1'),
    "33 parent": ("parent\n  found:    None", restate, None, "parent"),
    "36 a training loss": ("002_B/log.jsonl: edited", set_events, "002_B", "step", dict(train_loss=4.0)),
    "38 page": ("README.md: found", edit_file, "README.md", "2.1", "2.0"),
    "42 data in the result": ("data_sha256 of the result: found b191a7b9", add_to_events, "result",
                              dict(data_sha256=record.POCKET_DATA), dict(data_sha256="e" * 64)),
    "43 ranks in the result": ("world_size of the result: found 1, expected 8", add_to_events, "result",
                               dict(world_size=1), dict(world_size=8)),
    "44 validation tokens in the result": ("002_B, val_tokens: found 1024, expected 65536", add_to_events, "result",
                                           dict(val_tokens=65_536), dict(config=FEW_TOKENS)),
    "45 validation tokens in the header": ("val_tokens of the settings: found 65536, expected 1024", add_to_events,
                                           "header", dict(val_tokens=1024)),
    "46 threads in the result": ("002_B, threads: found None, expected 2", add_to_events, "result", dict(threads=2),
                                 dict(hardware="a CPU")),
    "47 wall time": ("wall_s of manifest.jsonl: found 5.0, expected 88", set_lines, 2, dict(wall_s=5.0)),
    "48 time outside of the phases": ("wall_s of manifest.jsonl: found 130.0, expected 88", set_lines, 2,
                                      dict(wall_s=130.0)),
    "49 overlapping runs": ("run 3: found start 2025-11-09T12:08:00, expected a time after", set_lines, 3,
                            dict(time="2025-11-09T12:08:00")),
    "50 no start": ("run 3: found start None", set_lines, 3, dict(time=None)),
    "41 run folder": ("training losses of 002_B", clone),
}

# One case in three runs without --all.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (i % 3 > 0))
                                  for i, name in enumerate(EDITS)])
def test_edits__each_contradicts_another_file(chain, tmp_path, name) -> None:
    """`check` finds each edit, also after `new --update`, whether that refuses the record or writes it."""
    root = shutil.copytree(chain / "records", tmp_path / "records")
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    said, act, *given = EDITS[name]
    act(root / EIGHT, *given)
    refused = call("new", "--records", root, "--update=02")[0]
    found = check(root, "02")
    if not refused and name[:2] in ("32", "36", "38", "41"):
        assert found == "", "`new --update` restores what it generates, and the hash of a log follows the log"
        shutil.rmtree(root)
        shutil.copytree(chain / "records", root)
        act(root / EIGHT, *given)
        found = check(root, "02")
    assert said in found, found

UNFOUND = {                                  # edits that only the history of the repository shows
    "4 planned pairs": (rewrite_manifest, replanned),
    "51 last pair cut": (cut_last_pair,),
    "27 recompiles": (set_events, OURS, "result", dict(recompiles=0), False),
    "39 words": (edit_file, "README.md", "The idea:", "The idea: mine"),
}

@pytest.mark.parametrize("name", UNFOUND)
def test_edits__that_nothing_contradicts(chain, tmp_path, name) -> None:
    """README.md has the same list of edits."""
    root = shutil.copytree(chain / "records", tmp_path / "records")
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    act, *given = UNFOUND[name]
    act(root / EIGHT, *given)
    new(root, "--update=02")
    assert check(root, "02") == ""

def test_new__a_run_marked_as_failed_that_has_a_result(chain, tmp_path) -> None:
    """Earlier, `new` left such runs out."""
    root = shutil.copytree(chain / "records", tmp_path / "records")
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    bench = Path(shutil.copytree(chain / "third_with_parent", tmp_path / "third_with_parent"))
    edit(bench / "manifest.jsonl", '"outcome": "done"', '"outcome": "failed"')
    status, _, error = call("new", "--records", root, "X", bench, chain / "third_with_base", "--track=pocket_time",
                            "--idea=x", "--parent=02", "--date=2026-01-03")
    assert status == 2 and "failed, although its log has a result" in error, error

def test_new__prints_all_findings(tmp_path) -> None:
    root = tmp_path / "records"
    root.mkdir()
    runs = of_chain(tmp_path / "runs", seeds=4, loss=2.21, world_size=2)
    status, _, error = call("new", "--records", root, "X", runs, "--track=pocket_time", "--date=2026-13-01",
                            "--idea=one two three four five six")
    assert status == 2 and error.count("\n  found: ") == 1
    for said in ("date: found 2026-13-01: month must be", "over 5 seeds", "one to 5 words", "seed3, threads: found 4"):
        assert said in error, error

@pytest.mark.parametrize("date", ["2026-02-30", "2026-99-99", f"{datetime.date.today() + datetime.timedelta(days=2)}"])
def test_new__dates_that_no_record_can_have(root, tmp_path, date) -> None:
    status, _, error = call("new", "--records", root, "X", make_runs(tmp_path / "runs"), "--track=pocket",
                            f"--date={date}")
    assert status == 2 and f"date: found {date}: " in error and "in the future" in error, error
    restate(root / FIRST, date, "date")
    rename(root / FIRST, f"{date}_01_First")
    assert f"date: found {date}: " in check(root, "01")

def test_new__names_the_flag_in_which_a_run_of_the_parent_differs(chain, tmp_path) -> None:
    """Earlier, it only said that a group mixes source_sha256."""
    root = shutil.copytree(chain / "records", tmp_path / "records")
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    bench = Path(shutil.copytree(chain / "third_with_parent", tmp_path / "third_with_parent"))
    for run_dir in bench.glob("runs/*_A"):
        edit(run_dir / "logs/x/log.jsonl", '"lr": 0.1', '"lr": 0.2')
    status, _, error = call("new", "--records", root, "X", bench, chain / "third_with_base", "--track=pocket_time",
                            "--idea=x", "--parent=02", "--date=2026-01-03")
    assert status == 2 and "runs of A: found they have the source of record 02, but lr 0.2, not 0.1" in error, error
    assert "mixes source_sha256" not in error

def test_new__names_the_runs_that_failed(two_records) -> None:
    page = (two_records / "records" / SECOND / "README.md").read_text()
    assert re.search(r"\| B +\| 3 \(3 of 4 started\) +\| ", page)
    assert page.index("| runs/007_B") < page.index("<details>"), "below the number of runs"
    (two_records / "more").mkdir(exist_ok=True)
    _, _, error = call("new", "--records", two_records / "more", "Again", two_records / "bench", "--kind=comparison")
    assert "runs/007_B was started and is not counted: failed, exit status 1" in error
    assert "group B: 3 of 4 started runs count" in error

def test_numbers__phases_of_one_name_add_up(two_records) -> None:
    """Earlier, the last one replaced the others."""
    untimed = result_of(two_records / "records" / FIRST)["runs"]["seed1"]["untimed_s"]
    assert untimed == {"set-up": 0.4, "warm-up of stage 1": 2.1, "warm-up": 5.0, "evaluation": 3.0}

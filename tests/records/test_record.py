"""records/tools/record.py: `new` makes records, `check` finds each kind of damage and laundering, `table` ranks."""
import datetime
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from record_common import OTHER_SOURCE, SOURCE, call, edit, events_of, make_run, write_events

from tools import record                                     # noqa: E402

LOSSES, SECONDS = (2.171, 2.144, 2.162), (99.1, 97.7, 95.7)
CPU = dict(hardware="a CPU", world_size=1)
RACE = dict(config={"val_tokens": 10_485_760, "bigram_rows": 500}, world_size=8)
FIRST, SECOND = "2026-01-01_01_First", "2026-01-02_02_Second"

def make_runs(folder: Path, losses=LOSSES, seconds=SECONDS, **facts) -> Path:
    for seed, (loss, s) in enumerate(zip(losses, seconds)):
        make_run(folder / f"seed{seed}", seed, loss, s, **(CPU | facts))
    return folder

def new(root: Path, *argv: object) -> Path:
    status, out, error = call("new", "--records", root, *argv)
    assert status == 0, error
    return Path.cwd() / out.strip()

def check(root: Path, *argv: object) -> str:
    """What check finds, "" for nothing."""
    status, out, error = call("check", "--records", root, *argv)
    assert status == int("all numbers follow from their files" not in out), out + error
    return out if status else ""

def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())

@pytest.fixture(scope="module")
def two_records(tmp_path_factory) -> Path:
    """An entry, and a comparison with the entry as parent, another source on one side, and a manifest."""
    place = tmp_path_factory.mktemp("records")
    root = place / "records"
    root.mkdir()
    new(root, "First", make_runs(place / "runs"), "--track=pocket", "--date=2026-01-01")
    lines = [dict(type="bench", pairs=3, sides={"A": {"flags": []}, "B": {"flags": []}})]
    for number in range(1, 8):
        name = "ABBAABB"[number - 1]
        pair = (number + 1) // 2
        folder = f"runs/{number:03}_{name}"
        source = OTHER_SOURCE if name == "B" else SOURCE
        if number < 7:
            make_run(place / "bench" / folder / "logs/x", pair, 2.15 + pair / 100 + (name == "B") / 5,
                     90.0 + number / 10, source=source, **CPU)
        lines.append(dict(type="end", run=number, pair=pair, side=name, folder=folder, cause="",
                          outcome="done" if number < 7 else "failed"))
    write_events(place / "bench/manifest.jsonl", lines)
    new(root, "Second", place / "bench", "--kind=comparison", "--parent=01", "--date=2026-01-02")
    (root / "README.md").write_text(f"[one]({FIRST}/README.md) and `[no link](here)`\n")
    (place / "README.md").write_text("[all](records/README.md#rules) and [web](https://example.org)\n")
    assert check(root) == ""
    return place

@pytest.fixture
def root(two_records, tmp_path) -> Path:
    return Path(shutil.copytree(two_records, tmp_path / "copy")) / "records"

def test_check__records_of_this_repository():
    status, out, error = call("check")
    assert status == 0, out + error

def test_build__numbers_are_those_of_the_logs(two_records):
    result = result_of(two_records / "records" / FIRST)
    group = result["groups"][""]
    assert group["losses"] == list(LOSSES) and group["times"] == list(SECONDS)
    assert (group["loss"]["mean"], group["loss"]["sd"]) == pytest.approx((np.mean(LOSSES), np.std(LOSSES, ddof=1)))
    assert result["class"] == "plain" and result["entry"]["params_total"] == 1000
    page = (two_records / "records" / FIRST / "README.md").read_text()
    assert "2.159" in page and "losses = [2.171, 2.144, 2.162]" in page and "[seed1](logs/seed1/log.jsonl)" in page
    second = result_of(two_records / "records" / SECOND)
    assert second["verdicts"]["B"]["verdict"] == "higher loss"
    assert [line["folder"] for line in second["unfinished"]] == ["runs/007_B"] and "007_B" in (
        two_records / "records" / SECOND / "README.md").read_text()
    assert second["verdicts"]["B"]["loss"]["mean"] == pytest.approx(0.2)
    assert (two_records / "records" / SECOND / "sources/B.diff").read_text().count("line_7 = 8") == 1

def test_new__update_keeps_what_is_written_by_hand(root):
    edit(root / FIRST / "README.md", "The idea:\n", "The idea: fewer words.\n")
    before = (root / FIRST / "README.md").read_text()
    new(root, "--update=01")
    assert (root / FIRST / "README.md").read_text() == before and check(root) == ""

@pytest.mark.parametrize("argv, said", [
    (["X", "{runs}", "--track=pocket", "--date=1st"], "YYYY-MM-DD_nn"), (["Bad name", "{runs}"], "YYYY-MM-DD_nn"),
    (["X", "{root}"], "restore it, or leave it out"), (["X", "{runs}"], "track None"),
    (["X", "{runs}", "--track=8xGPU"], "8 on track 8xGPU"),
    (["X", "{runs}", "{runs}", "--track=pocket"], "two runs of one name"),
    (["X", "a={runs}", "b={other}", "--track=pocket", "--parent=09"], "give its folder's name or its number"),
    (["X", "{runs}", "{other}", "--track=pocket"], "source_sha256")])
def test_new__what_is_no_record(root, tmp_path, argv, said):
    places = dict(root=root / "none", runs=make_runs(tmp_path / "runs"),
                  other=make_runs(tmp_path / "other", (2.2, 2.3, 2.4), source=OTHER_SOURCE))
    for number, run in enumerate(sorted((tmp_path / "other").iterdir())):
        run.rename(run.with_name(f"other{number}"))
    before = sorted(root.rglob("*"))
    status, _, error = call("new", "--records", root, *[word.format(**places) for word in argv])
    assert status == 2 and said in error, error
    assert [path for path in sorted(root.rglob("*")) if ".unfinished" not in path.parts] == before

def edits(name: str, old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder / name, old, new)

def removes(name: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return remove

def adds(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text("more\n")

DAMAGES = {
    "a number of the page": (edits("README.md", "2.159", "2.151"), "README.md: found"),
    "a list of times": (edits("README.md", "97.7", "96.7"), "README.md: found"),
    "a mean": (edits("result.json", "2.159", "2.158"), "result.json: found"),
    "a stranger's key": (edits("result.json", '"target": null', '"target": null, "more": 1'), "result.json: found"),
    "the mark": (edits("README.md", "<!-- end of what", "<!-- the end of what"), "README.md: found"),
    "a cut page": (edits("README.md", "[seed0]", "seed0"), "README.md: found"),
    "a final loss": (edits("logs/seed1/log.jsonl", '"val_loss": 2.144', '"val_loss": 2.134'), "seed1"),
    "a training loss": (edits("logs/seed1/log.jsonl", '"train_loss": 4.9', '"train_loss": 4.8'), "edited"),
    "no log": (removes("logs/seed1/log.jsonl"), "seed1"), "no log.txt": (removes("logs/seed1/log.txt"), "seed1"),
    "no run": (removes("logs/seed2"), "seed2"), "no source": (removes("train_gpt.py"), "train_gpt.py"),
    "no picture": (removes("loss.png"), "loss.png"), "no page": (removes("README.md"), "README.md"),
    "no result": (removes("result.json"), "result.json"),
    "another source": (edits("train_gpt.py", "= 7", "= 6"), "not the source"),
    "a stranger's file": (adds("logs/notes.txt"), "notes.txt: added"), "a hidden file": (adds(".hidden"), "added"),
    "a picture": (adds("loss.png"), "loss.png: edited"),
    "a name": (lambda folder: folder.rename(folder.with_name("2026-01-01_01_Best")), "found this folder name"),
    "a number twice": (lambda folder: folder.rename(folder.with_name("2026-01-01_02_First")), "several records"),
    "a date": (edits("result.json", '"2026-01-01"', '"2026-01-03"'), "found this folder name"),
}

@pytest.mark.parametrize("name", DAMAGES)
def test_check__damage_is_named(root, name):
    damage, said = DAMAGES[name]
    damage(root / FIRST)
    assert said in check(root)

@pytest.mark.parametrize("damage, said", [
    (edits("sources/B.diff", "+line_7 = 8", "+line_7 = 9"), "B.diff: edited"), (removes("sources"), "B.diff: missing"),
    (edits("logs/manifest.jsonl", '"failed"', '"lost"'), "manifest.jsonl"), (removes("logs/runs/006_B"), "006_B")])
def test_check__damage_of_a_comparison_is_named(root, damage, said):
    damage(root / SECOND)
    assert said in check(root)

def sets(kind: str, *seeds: int, scale: float = 1.0, **facts) -> Callable[[Path], None]:
    """Change events of a type in log.jsonl, and all times; log.txt keeps its own."""
    def launder(folder: Path) -> None:
        for seed in seeds or range(3):
            log = folder / f"logs/seed{seed}/log.jsonl"
            events = events_of(log)
            for event in events:
                if "train_time_ms" in event:
                    event["train_time_ms"] *= scale
                if event["type"] == kind:
                    event |= facts
            write_events(log, events)
    return launder

def better_losses(folder: Path) -> None:
    sets("val", val_loss=2.1)(folder)
    sets("result", val_loss=2.1)(folder)

def in_result(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def launder(folder: Path) -> None:
        result = result_of(folder)
        change(result["stated"])
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return launder

def copy_run(folder: Path) -> None:
    """A second seed from a copy, its seed changed wherever it stands."""
    copy = Path(shutil.copytree(folder / "logs/seed1", folder / "logs/seed5"))
    lines = (copy / "log.jsonl").read_text()
    (copy / "log.jsonl").write_text(lines.replace('"seed": 1', '"seed": 5'))
    edit(copy / "log.txt", "seed 1", "seed 5")
    in_result(lambda stated: stated["groups"][""].append("seed5"))(folder)

def link_out(folder: Path) -> None:
    log = folder / "logs/seed1/log.jsonl"
    log.rename(folder.parent / "elsewhere.jsonl")
    log.symlink_to("../../../elsewhere.jsonl")

def future(folder: Path) -> None:
    day = str(datetime.date.today() + datetime.timedelta(days=9))
    in_result(lambda stated: stated.update(date=day))(folder)
    folder.rename(folder.with_name(f"{day}_01_First"))

LAUNDERED = {
    "better losses": better_losses, "better result": sets("result", 2, val_loss=2.1),
    "nan": sets("val", 1, val_loss=math.nan),
    "times": sets("", scale=0.9), "times of one": sets("", 0, scale=0.9), "seed": sets("header", 1, seed=9),
    "hardware": sets("header", hardware="a better CPU"), "hardware of one": sets("header", 1, hardware="a better CPU"),
    "a loss in log.txt": edits("logs/seed1/log.txt", "val_loss:2.1440", "val_loss:2.1340"),
    "a time in log.txt": edits("logs/seed1/log.txt", "2.1440 train_time:97700ms", "2.1440 train_time:96700ms"),
    "a copied run": copy_run, "a link": link_out, "a day to come": future,
    "a run out of its group": in_result(lambda stated: stated["groups"][""].remove("seed2")),
    "another track": in_result(lambda stated: stated.update(track="8xGPU")),
    "stated over logged": in_result(lambda stated: stated["entry"].update(params_total=1)),
}

@pytest.mark.parametrize("name", LAUNDERED)
def test_doubts__laundering_is_found(root, name):
    LAUNDERED[name](root / FIRST)
    call("new", "--records", root, "--update=01")
    assert check(root), "and update, which refuses or writes, hides nothing"

def test_doubts__a_run_of_the_manifest_cannot_be_left_out(root):
    shutil.rmtree(root / SECOND / "logs/runs/006_B")
    in_result(lambda stated: stated["groups"]["B"].remove("runs/006_B"))(root / SECOND)
    status, _, error = call("new", "--records", root, "--update=02")
    assert status == 2 and "runs/006_B is done and left out" in error

def test_check__runs_no_program_of_a_foreign_folder(root, tmp_path, monkeypatch):
    """Second round 9 of the hostile cases: `git log` there ran what its .git/config names."""
    (tmp_path / "bin").mkdir()
    git = tmp_path / "bin/git"
    git.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    git.chmod(0o755)
    (root.parent / ".git").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert check(root) == "" and not (tmp_path / "ran").exists()

def test_findings__a_sealed_record(root):
    result = result_of(root / FIRST)
    result.pop("picture_sha256", None)
    result["files"] = record.hashes(root / FIRST)
    result["sealed"] = record.sealed(root / FIRST, result)
    (root / FIRST / "result.json").write_text(json.dumps(result))
    assert check(root, "01") == ""
    assert "a sealed one" in call("new", "--records", root, "--update=01")[2]
    for name, old, new_text, said in (("README.md", "2.159", "2.151", "README.md: edited"),
                                      ("result.json", '"class": "plain"', '"class": "table"', "result.json: edited"),
                                      ("logs/seed1/log.txt", "2.1440", "2.1340", "log.txt: edited")):
        edit(root / FIRST / name, old, new_text)
        assert said in check(root, "01")
        edit(root / FIRST / name, new_text, old)

@pytest.mark.parametrize("settings, expected", [
    (dict(vocab_size=100, bigram_rows=1000), "plain"), (dict(vocab_size=100, bigram_rows=1001), "table"),
    (dict(vocab_size=100, bigram_rows=5, tables=[dict(rows=10**6)]), "table"), (dict(vocab_size=100), None)])
def test_class_of__from_the_configuration(settings, expected):
    """Fault 7: it was taken from the header's table rows, which can be empty."""
    assert record.class_of(settings) == expected

def test_table__classes_apart_and_proven_ones_ranked(tmp_path):
    root = tmp_path / "records"
    root.mkdir()
    pools = {"Base": (3.278, 90.0, {}, 500), "Fast": (3.279, 80.0, {}, 500), "Unproven": (3.281, 70.0, {}, 500),
             "Systems": (3.2805, 75.0, {}, 500), "Tables": (3.270, 60.0, {}, 5000)}
    for day, (name, (loss, seconds, _, rows)) in enumerate(pools.items(), 1):
        runs = make_runs(tmp_path / name, (loss, loss - 0.0002, loss + 0.0002), (seconds, seconds + 0.1, seconds + 0.2),
                         **RACE | dict(config=RACE["config"] | {"bigram_rows": rows}))
        flags = ["--systems"] if name == "Systems" else []
        new(root, name, runs, "--track=8xGPU", f"--date=2026-01-0{day}", *flags)
    lists = json.loads(call("table", "--records", root, "--json")[1])
    plain, = (rows for title, rows in lists.items() if "track 8xGPU, class plain" in title)
    ranks = {row["record"][3:]: row["rank"] for row in plain}
    assert ranks == {"Unproven": None, "Systems": None, "Fast": 1, "Base": 2} and len(lists) == 2
    status, said, _ = call("table", "--records", root)
    assert status == 0 and "class table" in said and said.index("02 Fast") < said.index("01 Base")

RECORD_OF_CHAIN = dict(data_sha256=record.POCKET_DATA, hardware="a CPU, 2 cores, 2 threads", world_size=1)

def bench_runs(place: Path, sources: dict, seconds: dict, loss: dict, pairs: int = 6) -> Path:
    """A bench as `records bench` leaves it: sides in ABBA order, a manifest, seeds by pair."""
    lines = [dict(type="bench", pairs=pairs, sides={name: {"flags": []} for name in sources})]
    for number in range(1, 2 * pairs + 1):
        side, pair = "ABBA"[(number - 1) % 4], (number + 1) // 2
        folder = f"runs/{number:03}_{side}"
        make_run(place / folder / "logs/x", pair, loss[side] + pair / 1000 + number / 1e5,
                 seconds[side] * (1 + (pair % 3) / 1000), source=sources[side], **RECORD_OF_CHAIN)
        facts = dict(run=number, pair=pair, side=side, folder=folder, cause="", outcome="done")
        lines += [facts | dict(type="start"), facts | dict(type="end")]
    write_events(place / "manifest.jsonl", lines)
    return place

THIRD_SOURCE = SOURCE.replace("= 9\n", "= 99\n").replace("= 7\n", "= 8\n")
BASE, PARENT = dict(seconds=100.0, loss=2.16), dict(seconds=80.0, loss=2.17)

@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    """Three links: the base, a record in turn with it, and one in turn with that one and with the base."""
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

def test_chain__ratios_are_those_of_the_benches(chain):
    (title, rows), = json.loads(call("table", "--records", chain / "records", "--json")[1]).items()
    assert title == "track pocket_time, class plain" and {row["class"] for row in rows} == {"plain"}
    assert [row["idea"] for row in rows] == ["recipe A, fewest steps", "eight for seven", "ninety nine for nine"]
    assert [row.get("ratio_to_parent") for row in rows] == [None, pytest.approx(0.8), pytest.approx(0.75)]
    assert [row.get("ratio_to_base") for row in rows] == [None, pytest.approx(0.8), pytest.approx(59 / 101)]
    assert not [key for key in rows[0] if "ratio" in key or "diff" in key], "the base has none"
    assert [row["n"] for row in rows] == [6, 6, 6] and [row.get("diff_lines") for row in rows] == [None, 2, 2]
    page = (chain / "records/2026-01-03_03_NinetyNine/README.md").read_text()
    assert "class plain, idea: ninety nine for nine" in page and "[base 2026-01-01_01_Base]" in page

def test_chain__picture(chain, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    status, said, _ = call("table", "--records", chain / "records", f"--plot={tmp_path}/chain.png")
    assert status == 0 and "eight for seven" in said
    ink = image.imread(tmp_path / "chain.png")[..., 3] > 0.5
    assert ink[:, :ink.shape[1] // 2].any() and ink[:, ink.shape[1] // 2:].any(), "both halves"

def of_chain(folder: Path, seeds: int = 6, loss: float = 2.17, **facts) -> Path:
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
def test_chain__what_is_no_entry(tmp_path, runs, argv, said):
    folder = of_chain(tmp_path / "runs", **runs)
    root = tmp_path / "records"
    root.mkdir()
    status, _, error = call("new", "--records", root, "X", folder, "--track=pocket_time", "--idea=x", *argv)
    assert status == 2 and said in error, error

@pytest.mark.parametrize("benches, parent, said", [
    (["slower"], "01", "faster, in turn with it"), (["third_with_parent"], "02", "beside the base, 2026-01-01_01_Base"),
    (["third_with_base"], "02", "beside the parent, 2026-01-02_02_Eight"), (["with_base"], None, "name it: --parent"),
    (["no_bench"], "01", "no bench")])
def test_chain__no_entry_without_benches_that_it_won(chain, tmp_path, benches, parent, said):
    root = shutil.copytree(chain / "records", tmp_path / "records")
    bench_runs(tmp_path / "slower", {"A": SOURCE, "B": THIRD_SOURCE}, {"A": 100.0, "B": 101.0}, {"A": 2.16, "B": 2.17})
    of_chain(tmp_path / "no_bench", source=THIRD_SOURCE)
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    places = [next(path for path in (tmp_path / name, chain / name) if path.exists()) for name in benches]
    flags = [f"--parent={parent}"] if parent else []
    status, _, error = call("new", "--records", root, "X", *places, "--track=pocket_time", "--idea=x", *flags)
    assert status == 2 and said in error, error

"""records/tools/record.py: `new` creates records, `check` finds damage, `table` ranks; the rules of a chain."""
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from common import run

from record_common import (CPU, OTHER_SOURCE, SOURCE, bench_plan, call, edit, events_of,
                           make_bench_run, make_run, manifest_lines, write_events)

from tools import files, record, statistics                               # noqa: E402

LOSSES = (2.171, 2.144, 2.162)
SECONDS = (99.1, 97.7, 95.7)
FIRST = "2026-01-01_01_First"
SECOND = "2026-01-02_02_Second"

def make_runs(folder: Path, losses: Sequence[float] = LOSSES, seconds: Sequence[float] = SECONDS,
              **facts: object) -> Path:
    for seed, (loss, s) in enumerate(zip(losses, seconds)):
        make_run(folder / f"seed{seed}", seed, loss, s, **(CPU | facts))
    return folder

def new(root: Path, *argv: object) -> Path:
    """Call `new`, which must succeed; return the record directory."""
    root.mkdir(exist_ok=True)
    status, out, error = call("new", "--records", root, *argv)
    assert status == 0, error
    return Path.cwd() / out.strip()

def refused(root: Path, *argv: object) -> str:
    """Call `new`, which must refuse the runs; return why."""
    root.mkdir(exist_ok=True)
    before = sorted(root.rglob("*"))
    status, _, error = call("new", "--records", root, *argv)
    assert status == 2 and sorted(root.rglob("*")) == before, "a failed call leaves no files"
    return error

def check(root: Path, *argv: object) -> str:
    """Call `check`; return its findings, "" for none."""
    status, out, error = call("check", "--records", root, *argv)
    assert status == int("no number differs" not in out), out + error
    return out if status else ""

def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())

def restate(folder: Path, value: object, *keys: str) -> None:
    """Change what result.json states under nested keys."""
    result = result_of(folder)
    holder = result["stated"]
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")

@pytest.fixture(scope="module")
def two_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An entry, and a comparison that has the entry as parent, a different source on one side, and a manifest."""
    place = tmp_path_factory.mktemp("records")
    root = place / "records"
    new(root, "First", make_runs(place / "runs"), "--track=pocket", "--date=2026-01-01")
    lines = [bench_plan(dict(A=SOURCE, B=OTHER_SOURCE), 3)]
    for number, name in enumerate("ABBAAB", 1):
        pair = (number + 1) // 2
        loss = 2.15 + pair / 100 + 0.2 * (name == "B")
        source = dict(A=SOURCE, B=OTHER_SOURCE)[name]
        lines += make_bench_run(place / "bench", number, pair, name, loss, 90 + number / 10, source, **CPU)
    lines += manifest_lines(7, 4, "B", "runs/007_B", OTHER_SOURCE, outcome="failed", cause="exit status 1")
    write_events(place / "bench/manifest.jsonl", lines)
    new(root, "Second", place / "bench", "--kind=comparison", "--parent=01", "--date=2026-01-02")
    assert check(root) == ""
    return place

@pytest.fixture
def root(two_records: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_records, tmp_path / "copy")) / "records"


# ---- Verbs new and check --------------------------------------------------------------------------------------------
def test_check__records_of_this_repository() -> None:
    status, out, error = call("check")
    assert status == 0, out + error

def test_build__numbers_are_those_of_the_logs(two_records) -> None:
    first = two_records / "records" / FIRST
    group = result_of(first)["groups"][""]
    assert group["losses"] == list(LOSSES) and group["times"] == list(SECONDS)
    assert group["loss"]["mean"] == pytest.approx(np.mean(LOSSES))
    assert group["loss"]["sd"] == pytest.approx(np.std(LOSSES, ddof=1))
    assert result_of(first)["class"] == "plain" and result_of(first)["machine"]["params_total"] == 1000
    assert result_of(first)["runs"]["seed1"]["untimed_s"] == {
        "set-up": 0.4, "warm-up of stage 1": 2.1, "warm-up": 5.0, "evaluation": 3.0}, "phases of one name add up"
    for part in ("2.1590", "| 1    | 2.1440 | 97.7       |", "# 01 First: loss 2.159 (2.080 to 2.238) in 97.5 s"):
        assert part in (first / "README.md").read_text()

def test_build__a_comparison_names_the_runs_that_failed(two_records) -> None:
    second = two_records / "records" / SECOND
    result = result_of(second)
    verdict = result["verdicts"]["B"]
    assert verdict["verdict"] == "higher loss" and verdict["loss"]["mean"] == pytest.approx(0.2)
    assert [line["folder"] for line in result["unfinished"]] == ["runs/007_B"]
    assert (second / "sources/B.diff").read_text().count("line_7 = 8") == 1
    shown = (second / "README.md").read_text()
    assert shown.startswith("# 02 Second: B - A: loss +0.2000 (") and "[changes of the source](source.diff)" in shown
    assert re.search(r"\| B +\| 3 \(3 of 4 started\) +\| ", shown)
    assert shown.index("| runs/007_B") < shown.index("<details>"), "below the number of runs"

def test_new__update_keeps_what_is_written_by_hand_and_either_form_of_a_log_is_the_same_record(root) -> None:
    edit(root / FIRST / "README.md", "The idea:\n", "The idea: fewer words.\n")
    before = (root / FIRST / "README.md").read_text()
    new(root, "--update=01")
    assert (root / FIRST / "README.md").read_text() == before and check(root) == ""
    logs = sorted((root / FIRST / "logs").rglob("*.*"))
    assert [path.name for path in logs] == ["log.jsonl.gz"] * 3
    assert result_of(root / FIRST)["files"]["logs/seed1/log.jsonl"] == files.sha256(logs[1])
    subprocess.run(["gunzip", *map(str, logs)], check=True, timeout=60)
    assert check(root) == ""

@pytest.mark.parametrize("argv, said", [
    (["Bad name", "{runs}"], "at most 60"), (["X" * 300, "{runs}"], "at most 60"),
    (["X", "{root}"], "give a run directory"), (["X", "{runs}"], "give --track"),
    (["X", "{runs}", "--track=8xGPU"], "8 on track 8xGPU"),
    (["X", "{same_names}", "{runs}", "--track=pocket"], "another log"),
    (["X", "a={runs}", "b={other}", "--track=pocket", "--parent=09"], "0 records fit '09'"),
    (["X", "{runs}", "{other}", "--track=pocket"], "mixes source_sha256"),
    (["X", "{runs}", "{cuda}", "--kind=comparison"], "one cuda, not"),
    (["X", "{resumed}", "--track=pocket"], "that was not resumed"),
    (["X", "{later}", "--track=pocket", "--date=2026-01-01"], "after the date of the record"),
    (["X", "{void}", "--track=pocket"], "valid times that was not resumed (profiled)"),
    (["X", "{diverged}", "--track=pocket"], "not a finished run")])
def test_new__what_is_no_record(root, tmp_path, argv, said) -> None:
    places = dict(root=root / "none", runs=make_runs(tmp_path / "runs"))
    for name, facts in dict(other=dict(source=OTHER_SOURCE), same_names={}, cuda=dict(cuda="1"), resumed={},
                            later=dict(started=1_790_000_000), diverged={}, void=dict(result=dict(void="profiled"))
                            ).items():
        places[name] = make_runs(tmp_path / name, (2.2, 2.3, 2.4 if name != "diverged" else float("nan")), **facts)
        if name != "same_names":
            for path in sorted(places[name].iterdir()):
                path.rename(path.with_name(f"{name}-{path.name}"))
    log = places["resumed"] / "resumed-seed1/log.jsonl"
    header, *events = events_of(log)
    write_events(log, [header, *events[:6], header | dict(type="resumed", step=1), *events[6:]])
    assert said in refused(root, *[word.format(**places) for word in argv])

def test_new__copies_runs_of_another_record_and_reads_those_that_older_ones_name(root) -> None:
    again = new(root, "Again", root / FIRST, "--track=pocket", "--date=2026-01-03")
    assert check(root) == "" and len([*again.rglob("log.jsonl.gz")]) == 3
    shutil.rmtree(again / "logs")
    restate(again, [f"{FIRST}/seed{seed}" for seed in range(3)], "groups", "")
    new(root, "--update=03")
    assert check(root) == "" and f"[logs in 01](../{FIRST}/logs)" in (again / "README.md").read_text()

def remove(path: Path) -> None:
    path = files.stored(path)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()

def rename(path: Path, name: str) -> None:
    path.rename(path.with_name(name))

DAMAGES = {                                  # the finding, the record, the file, how it is damaged
    "a number of the page": ("README.md is not what follows", FIRST, "README.md", edit, "2.159", "2.151"),
    "a mean": ("result.json is not what follows", FIRST, "result.json", edit, "2.159", "2.158"),
    "a final loss": ("result.json", FIRST, "logs/seed1/log.jsonl", edit, '"val_loss": 2.144', '"val_loss": 2.134'),
    "a training loss": ("result.json", FIRST, "logs/seed1/log.jsonl", edit, '_loss_next": 4.9', '_loss_next": 4.8'),
    "no log": ("seed1", FIRST, "logs/seed1/log.jsonl", remove),
    "no source": ("train_gpt.py", FIRST, "train_gpt.py", remove),
    "no result": ("result.json", FIRST, "result.json", remove),
    "another source": ("not the source", FIRST, "train_gpt.py", edit, "= 7", "= 6"),
    "a name": ("directory name: expected", FIRST, "", rename, "2026-01-01_01_Best"),
    "a number twice": ("several records", FIRST, "", rename, "2026-01-01_02_First"),
    "a diff": ("result.json is not", SECOND, "sources/B.diff", edit, "+line_7 = 8", "+line_7 = 9"),
    "a manifest": ("result.json is not", SECOND, "logs/manifest.jsonl", edit, '"failed"', '"lost"'),
}

@pytest.mark.parametrize("name", DAMAGES)
def test_check__damage_is_named(root, name) -> None:
    said, folder, where, act, *given = DAMAGES[name]
    act(root / folder / where, *given)
    assert said in check(root)

def test_problems__a_run_of_the_manifest_cannot_be_left_out(root) -> None:
    shutil.rmtree(root / SECOND / "logs/runs/006_B")
    restate(root / SECOND, ["runs/002_B", "runs/003_B"], "groups", "B")
    status, _, error = call("new", "--records", root, "--update=02")
    assert status == 2 and "runs/006_B succeeded and is left out" in error

def test_check__a_record_of_another_tool_is_skipped(root) -> None:
    restate(root / FIRST, "prediction", "kind")
    assert call("check", "--records", root)[1].startswith(f"{FIRST} is not recomputed: its kind is prediction")
    assert "is of another tool" in call("new", "--records", root, "--update=01")[2]

@pytest.mark.parametrize("old, other", [
    ("".join(f"{n}\n" for n in range(30)), "x\n1\n"), ("", "a\n"), ("a\nb", "a\nb\n"), ("a\n", "b\nc"),
    ("a\n", "a\r\n6\f\u2028\r7\n")])
def test_diff_of__is_one_that_git_applies(tmp_path, old, other) -> None:
    (tmp_path / "train_gpt.py").write_bytes(old.encode())
    diff = record.diff_of(old, other)
    done = subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0 and (tmp_path / "train_gpt.py").read_bytes() == other.encode(), done.stderr

@pytest.mark.parametrize("settings, expected", [
    (dict(vocab_size=100, bigram_rows=1000), "plain"), (dict(vocab_size=100, bigram_rows=1001), "table"),
    (dict(vocab_size=100, bigram_rows=5, tables=[dict(rows=10**6)]), "table")])
def test_class_of__from_the_configuration(settings, expected) -> None:
    assert record.class_of(settings) == expected

def test_new__a_run_of_the_trainer_as_it_is(tmp_path) -> None:
    runs = [run(tmp_path / f"runs/{seed}", f"--seed={seed}", "--max_steps=2", "--sample_tokens=0") for seed in (1, 2)]
    assert [done.status for done in runs] == [0, 0], runs[0].err
    root = tmp_path / "records"
    new(root, "Tiny", tmp_path / "runs", "--kind=comparison")
    assert check(root) == ""

def test_table__ranks_proven_entries_by_class(tmp_path) -> None:
    root = tmp_path / "records"
    pools = [("Base", 3.278, 90.0, 500), ("Fast", 3.279, 80.0, 500), ("Unproven", 3.281, 70.0, 500),
             ("Tables", 3.270, 60.0, 5000)]                   # name, loss, seconds, rows of the bigram table
    for day, (name, loss, seconds, rows) in enumerate(pools, 1):
        config = dict(val_tokens=10_485_760, bigram_rows=rows)
        runs = make_runs(tmp_path / name, (loss, loss - 0.0002, loss + 0.0002), (seconds, seconds + 0.1, seconds + 0.2),
                         world_size=8, config=config)
        new(root, name, runs, "--track=8xGPU", f"--date=2026-01-0{day}")
    status, said, _ = call("table", "--records", root)
    plain, tables = said.split("class table")
    assert status == 0 and re.findall(r"\| (\S+) +\| \d\d (\w+)", tables) == [("1", "Tables")]
    assert re.findall(r"\| (\S+) +\| \d\d (\w+)", plain) == [("n/a", "Unproven"), ("1", "Fast"), ("2", "Base")]

def test_board__without_a_target_p_is_that_of_the_next_entry(tmp_path) -> None:
    losses = [2.1, 2.11, 2.12], [2.2, 2.21, 2.23]
    for name, of_name in zip(("Low", "High"), losses):
        new(tmp_path / "records", name, make_runs(tmp_path / name, of_name), "--track=pocket", "--date=2026-01-01")
    test = statistics.difference(*losses)
    said = call("table", "--records", tmp_path / "records")[1]
    assert re.search(rf"\| 1 +\| 01 Low +\| {test.p / 2:.5g} +\| 3 ", said), "one-sided"


# ---- The chain ------------------------------------------------------------------------------------------------------
CHAIN_CONFIG = dict(val_every=5, compile=1, train_files="data/pocket/train_*.bin", val_files="data/pocket/val_*.bin")
RECORD_OF_CHAIN = dict(data_sha256=record.POCKET_DATA, hardware="a CPU, 2 cores, 2 threads", world_size=1,
                       config=CHAIN_CONFIG, all_phases=True)
THIRD_SOURCE = SOURCE.replace("= 9\n", "= 99\n").replace("= 7\n", "= 8\n")
THREE = dict(A=SOURCE, parent=OTHER_SOURCE, idea=SOURCE.replace("= 9\n", "= 99\n"))

def bench_runs(place: Path, sources: dict[str, str], seconds: dict[str, float], loss: dict[str, float]) -> Path:
    """Write a bench as `records bench` does: interleaved sides, A B then B A, a manifest, one seed per pair."""
    lines = [bench_plan(sources, 6)]
    order = [*sources, *reversed(sources)]
    for number in range(1, len(sources) * 6 + 1):
        side, pair = order[(number - 1) % len(order)], 1 + (number - 1) // len(sources)
        lines += make_bench_run(place, number, pair, side, loss[side] + pair / 1000 + number / 1e5,
                                seconds[side] * (1 + (pair % 3) / 1000), sources[side], **RECORD_OF_CHAIN)
    write_events(place / "manifest.jsonl", lines)
    return place

@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three entries: the base, one interleaved with it, and one interleaved with that one and with the base."""
    place = tmp_path_factory.mktemp("chain")
    root = place / "records"
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

@pytest.fixture
def two(chain: Path, tmp_path: Path) -> Path:
    root = Path(shutil.copytree(chain / "records", tmp_path / "records"))
    shutil.rmtree(root / "2026-01-03_03_NinetyNine")
    return root

NEW_THIRD = "--track=pocket_time", "--idea=x", "--parent=02", "--date=2026-01-03"

def test_chain__ratios_are_those_of_the_benches(chain) -> None:
    said = call("table", "--records", chain / "records")[1]
    assert said.startswith("track pocket_time, class plain\n") and said.count("class ") == 1
    rows = [re.split(r" *\| *", row)[1:-1] for row in said.splitlines()[3:6]]
    assert [row[-3] for row in rows] == ["recipe A, fewest steps", "eight for seven", "ninety nine for nine"]
    assert [[cell[:5] for cell in row[-2:]] for row in rows] == [["n/a"] * 2, ["0.800"] * 2, ["0.750", "0.584"]]
    shown = (chain / "records/2026-01-03_03_NinetyNine/README.md").read_text()
    assert "class plain: ninety nine for nine." in shown and "base [2026-01-01_01_Base]" in shown
    assert re.match(r"# 03 NinetyNine: 0.584 of the base's time \(.*\), 0.750 of 02's \(", shown)

@pytest.mark.parametrize("side", [*THREE])
def test_chain__an_interrupted_run_makes_no_entry(two, tmp_path, side) -> None:
    seconds = dict(A=100.0, parent=80.0, idea=60.0)
    bench = bench_runs(tmp_path / "bench", THREE, seconds, dict.fromkeys(THREE, 2.17))
    failed = manifest_lines(19, 7, side, f"runs/019_{side}", THREE[side], outcome="interrupted", cause="interrupted")
    write_events(bench / "manifest.jsonl", [*events_of(bench / "manifest.jsonl"), *failed])
    assert "not partly proven: 0." in refused(two, "X", bench, *NEW_THIRD)

@pytest.mark.parametrize("losses, said", [
    ([2.171, 2.185, 2.195, 2.16, 2.175, 2.187], "level 0.0015"),
    ([2.1 + seed / 1e4 for seed in range(21)], "over 5 to 20 seeds"), ([2.17] * 4 + [2.171], "")])
def test_chain__the_proof_holds_after_each_seed(tmp_path, losses, said) -> None:
    for seed, loss in enumerate(losses):
        make_run(tmp_path / f"runs/{seed}", seed, loss, 100.0 + seed, **RECORD_OF_CHAIN)
    argv = [tmp_path / "records", "X", tmp_path / "runs", "--track=pocket_time", "--idea=x"]
    if said:
        assert said in refused(*argv)
    else:
        new(*argv)

def of_chain(folder: Path, seeds: int = 6, loss: float = 2.17, **facts: object) -> Path:
    for seed in range(seeds):
        make_run(folder / f"seed{seed}", seed, loss + seed / 1000, 100.0, **RECORD_OF_CHAIN | facts)
    return folder

@pytest.mark.parametrize("runs, argv, said", [
    (dict(seeds=4), [], "over 5 to 20 seeds"), (dict(loss=2.21), [], "against 2.2: not below it"),
    (dict(data_sha256="e" * 64), [], f"{record.POCKET_DATA} on track pocket_time"),
    (dict(hardware="a CPU, 4 cores, 4 threads"), [], "threads is 4, and 2 on track"),
    (dict(config={"val_tokens": 1024}), [], "65536 on track"),
    ({}, ["--idea=one two three four five six"], "one to 5 words"), ({}, ["--idea="], "one to 5 words")])
def test_chain__what_is_no_entry(tmp_path, runs, argv, said) -> None:
    folder = of_chain(tmp_path / "runs", **runs)
    assert said in refused(tmp_path / "records", "X", folder, "--track=pocket_time", "--idea=x", *argv)

@pytest.mark.parametrize("benches, parent, said", [
    (["slower"], "01", "not slower: 1.01 ("), (["third_with_parent"], "02", "of its base, 2026-01-01_01_Base"),
    (["third_with_base"], "02", "of its parent, 2026-01-02_02_Eight"),
    (["third_with_parent", "third_with_base"], "01", "mixes source_sha256"),
    (["with_base"], None, "choose the parent"), (["no_bench"], "01", "no bench has runs")])
def test_chain__no_entry_without_a_verdict_faster(chain, two, tmp_path, benches, parent, said) -> None:
    bench_runs(tmp_path / "slower", {"A": SOURCE, "B": THIRD_SOURCE}, {"A": 100.0, "B": 101.0}, {"A": 2.16, "B": 2.17})
    of_chain(tmp_path / "no_bench", source=THIRD_SOURCE)
    places = [next(path for path in (tmp_path / name, chain / name) if path.exists()) for name in benches]
    flags = [f"--parent={parent}"] if parent else []
    assert said in refused(two, "X", *places, "--track=pocket_time", "--idea=x", *flags)

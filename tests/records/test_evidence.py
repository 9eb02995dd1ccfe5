"""Records that cannot be laundered: every mutation of a record that an attacker tried is found, with or without
`new --update` behind it, or stands in records/README.md as one that no program finds."""
import json
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from test_shelf import ROOT, SOURCE, call, check, edit, edit_result, make_run, make_runs, new, read, write_text_log

from tools import evidence, history, layout, logs

FIRST = "2026-01-01_01_First"
COMMIT = ("-c", "user.name=someone", "-c", "user.email=someone@example.org", "-c", "commit.gpgsign=false", "commit")


def git(place: Path, *arguments: str) -> None:
    alone = os.environ | dict(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
    subprocess.run(["git", *arguments], cwd=place, check=True, capture_output=True, env=alone, timeout=60)


def commit(place: Path, message: str = "more") -> None:
    git(place, "add", "-A")
    git(place, *COMMIT, "-qm", message)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A repository with an entry of three runs, and a comparison with a bench-like manifest."""
    place = tmp_path_factory.mktemp("published")
    root = place / "records"
    root.mkdir()
    new(root, "First", make_runs(place / "runs"), "--track=pocket", "--date=2026-01-01")
    new(root, "Second", make_runs(place / "more", losses=(2.201, 2.214, 2.222)), "--track=pocket", "--date=2026-01-02")
    shutil.rmtree(place / "runs")
    shutil.rmtree(place / "more")
    git(place, "init", "-q")
    commit(place, "two records")
    return place


@pytest.fixture
def with_history(published, tmp_path) -> Path:
    """The records in a repository of their own."""
    return Path(shutil.copytree(published, tmp_path / "with")) / "records"


@pytest.fixture
def without_history(published, tmp_path) -> Path:
    return Path(shutil.copytree(published / "records", tmp_path / "without"))


# ---- What an attacker does to a record
def log(record: Path, seed: int = 1) -> Path:
    return record / f"logs/seed{seed}/log.jsonl"


def change_events(path: Path, change: Callable[[dict], None]) -> None:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        change(event)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def scale_times(event: dict) -> None:
    if "train_time_ms" in event:
        event["train_time_ms"] *= 0.9


def better_loss(event: dict) -> None:
    if event["type"] == "result" or event.get("step") == 10 and "val_loss" in event:
        event["val_loss"] = 2.1


def other_hardware(event: dict) -> None:
    if event["type"] == "header":
        event["hardware"] = "a better CPU"


def other_seed(event: dict) -> None:
    if event["type"] == "header":
        event["seed"] = event["config"]["seed"] = 9


def in_all_logs(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Of log.jsonl alone."""
    def mutate(record: Path) -> None:
        for seed in range(3):
            change_events(log(record, seed), change)
    return mutate


def in_both_logs(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """With care: log.txt follows."""
    def mutate(record: Path) -> None:
        in_all_logs(change)(record)
        for seed in range(3):
            write_text_log(log(record, seed).parent)
    return mutate


def swap_logs(record: Path) -> None:
    one, other = log(record, 0), log(record, 1)
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def cut_log(record: Path) -> None:
    whole = log(record).read_text().splitlines(keepends=True)
    log(record).write_text("".join(whole[:8]))


def crlf(record: Path) -> None:
    log(record).write_bytes(log(record).read_bytes().replace(b"\n", b"\r\n"))


def remove_run(record: Path) -> None:
    """As someone would who wants a smaller pool."""
    shutil.rmtree(log(record, 2).parent)
    edit_result(record, forget_run)


def forget_run(result: dict) -> None:
    result["stated"]["groups"][""].remove("seed2")


def copy_run(record: Path, seed: int = 5) -> None:
    """A second seed from a copy: the seed is changed wherever it stands."""
    def change(event: dict) -> None:
        if event["type"] == "header":
            event["seed"] = event["config"]["seed"] = seed

    def add(result: dict) -> None:
        result["stated"]["groups"][""].append(f"seed{seed}")

    shutil.copytree(log(record, 2).parent, log(record, seed).parent)
    change_events(log(record, seed), change)
    write_text_log(log(record, seed).parent)
    edit_result(record, add)


def copy_run_with_another_clock(record: Path) -> None:
    copy_run(record)
    change_events(log(record, 5), scale_times)
    write_text_log(log(record, 5).parent)


def link_out(record: Path) -> None:
    outside = record.parent / "elsewhere.jsonl"
    log(record).rename(outside)
    log(record).symlink_to(outside)


def fail_to_make(record: Path) -> None:
    """A `new` that was refused leaves nothing that counts."""
    runs = make_runs(record.parent / "elsewhere", losses=(2.1, 2.2))
    make_run(runs / "odd", 7, 2.0, 90.0, hardware="another")
    with pytest.raises(logs.ToolError):
        new(record.parent, "Odd", runs, "--track=pocket")
    shutil.rmtree(runs)


def bytes_that_are_no_picture(record: Path) -> None:
    (record / "loss.png").write_bytes(b"any bytes")


def another_picture(record: Path) -> None:
    shutil.copy(record.parent / "2026-01-02_02_Second/loss.png", record / "loss.png")


def another_picture_with_its_hash(record: Path) -> None:
    def note(result: dict) -> None:
        result["picture_sha256"] = layout.sha256(record / "loss.png")
    another_picture(record)
    edit_result(record, note)


def other_seed_in_both_logs(record: Path) -> None:
    change_events(log(record), other_seed)
    write_text_log(log(record).parent)


def shrink_and_rename(record: Path) -> None:
    remove_run(record)
    record.rename(record.with_name("2026-01-01_01_Again"))


def park_a_run(record: Path) -> None:
    """In another record, where it is nobody's."""
    elsewhere = record.parent / "2026-01-02_02_Second/more/seed2"
    elsewhere.parent.mkdir()
    log(record, 2).parent.rename(elsewhere)
    edit_result(record, forget_run)
    call("new", "--records", record.parent, "--update", "Second")


def later_run_dir(record: Path) -> None:
    """As if seed 1 had run after the record's date."""
    def change(event: dict) -> None:
        if event["type"] == "result":
            event["run_dir"] = "logs/20270101-120000-pocket-0"
    change_events(log(record), change)
    write_text_log(log(record).parent)


# Makers of mutations
Mutate = Callable[[Path], None]


def in_log(change: Callable[[dict], None]) -> Mutate:
    """Of seed 1."""
    def mutate(record: Path) -> None:
        change_events(log(record), change)
    return mutate


def replaced(name: str, old: str, new: str) -> Mutate:
    def mutate(record: Path) -> None:
        edit(record / name, old, new)
    return mutate


def without(name: str) -> Mutate:
    def mutate(record: Path) -> None:
        path = record / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return mutate


def with_file(name: str) -> Mutate:
    def mutate(record: Path) -> None:
        (record / name).write_text("mine")
    return mutate


def named(name: str) -> Mutate:
    def mutate(record: Path) -> None:
        record.rename(record.with_name(name))
    return mutate


def dated(date: str) -> Mutate:
    def state(result: dict) -> None:
        result["stated"]["date"] = date

    def mutate(record: Path) -> None:
        edit_result(record, state)
    return mutate


def by_hand(text: str) -> Mutate:
    """Above the marker."""
    return replaced("README.md", "The idea:", text)


def add_run(record: Path) -> None:
    make_run(record / "logs/seed7", 7, 2.1, 91.0)


class Mutation(NamedTuple):
    do: Mutate
    found: str                     # part of what `check`, or a refusing `new --update`, says
    update: bool = False           # `new --update` follows
    history: bool = False          # the records stand in their repository


LOG, TEXT = "logs/seed1/log.jsonl", "logs/seed1/log.txt"
STAYS = "a log that git has stays"
MUTATIONS = {
    # found by the first `check`
    "number on the page": Mutation(replaced("README.md", "| 97.5 ", "| 96.5 "), "README.md: found '| all"),
    "list of times": Mutation(replaced("README.md", "99.1,", "98.1,"), "README.md: found 'times"),
    "mean in result.json": Mutation(replaced("result.json", '"mean": 2.159', '"mean": 2.149'), '"mean": 2.149'),
    "log.jsonl deleted": Mutation(without(LOG), "log.jsonl: missing"),
    "log.txt deleted": Mutation(without(TEXT), "log.txt: missing"),
    "run deleted": Mutation(without("logs/seed1"), "log.jsonl: missing"),
    "logs swapped": Mutation(swap_logs, "log.jsonl: edited"),
    "final line edited": Mutation(in_log(better_loss), "log.jsonl: edited"),
    "log cut": Mutation(cut_log, "log.jsonl: edited"),
    "value in the middle": Mutation(replaced(LOG, '"step": 4', '"step": 3'), "log.jsonl: edited"),
    "folder renamed": Mutation(named("2026-01-01_01_Other"), "found this folder name"),
    "date changed": Mutation(dated("2025-01-01"), "found this folder name"),
    "stranger's text": Mutation(with_file("logs/notes.txt"), "logs/notes.txt: added"),
    "stranger's run": Mutation(add_run, "logs/seed7/log.jsonl: added"),
    "hidden file": Mutation(with_file("logs/.hidden"), "logs/.hidden: added"),
    "source edited": Mutation(replaced("train_gpt.py", "= 7", "= 9"), "does not hash"),
    "picture missing": Mutation(without("loss.png"), "dead link loss.png"),
    "page missing": Mutation(without("README.md"), "README.md: found 'nothing'"),
    "result.json missing": Mutation(without("result.json"), "result.json"),
    "marker missing": Mutation(replaced("README.md", "<!-- end of", "<!-- End of"), "README.md: found 'nothing'"),
    "number clash": Mutation(named("2026-01-01_02_First"), "a number of its own"),
    "dead link": Mutation(by_hand("[idea](idea.md)"), "dead link idea.md"),
    "line ends": Mutation(crlf, "log.jsonl: edited"),
    "loss that is no number": Mutation(replaced(LOG, '"val_loss": 2.144', '"val_loss": NaN'), "log.jsonl: edited"),
    "hardware of one run": Mutation(in_log(other_hardware), "mixed hardware"),
    "a new that failed": Mutation(fail_to_make, "nothing"),
    # hidden from it by an update, or by care
    "final loss and update": Mutation(in_log(better_loss), "as log.txt has it", True),
    "loss in log.txt and update": Mutation(replaced(TEXT, "loss:2.1440", "loss:2.1040"), "as log.txt has it", True),
    "times scaled and update": Mutation(in_all_logs(scale_times), "as log.txt has it", True),
    "seed changed and update": Mutation(in_log(other_seed), "seed of log.jsonl", True),
    "hardware of all and update": Mutation(in_all_logs(other_hardware), "hardware of log.jsonl", True),
    "date in the future and update": Mutation(dated("2126-01-01"), "no day after today", True),
    "run removed and update": Mutation(remove_run, STAYS, True, history=True),
    "run copied as another seed": Mutation(copy_run, "the clock readings of seed2", True),
    "log linked out of the record": Mutation(link_out, "a link out of the record", True),
    "any bytes as picture": Mutation(bytes_that_are_no_picture, "loss.png: no PNG"),
    "image of nowhere": Mutation(by_hand("<img alt='x' src='gone.png'>"), "dead link gone.png"),
    "text above the marker": Mutation(by_hand("The idea: **better**"), "nothing"),
}
MORE = {
    "seed, in both logs": Mutation(other_seed_in_both_logs, STAYS, True, history=True),
    "times of all, in both logs": Mutation(in_both_logs(scale_times), STAYS, True, history=True),
    "losses of all, in both logs": Mutation(in_both_logs(better_loss), STAYS, history=True),
    "hardware of all, in both logs": Mutation(in_both_logs(other_hardware), STAYS, history=True),
    "copy with another clock": Mutation(copy_run_with_another_clock, "under another seed, of seed2", True),
    "log.txt deleted and update": Mutation(without(TEXT), "log.txt\n  found:    nothing", True),
    "another picture": Mutation(another_picture, "loss.png: edited"),
    "another picture and its hash": Mutation(another_picture_with_its_hash, "other picture_sha256, unsaid",
                                             history=True),
    "record deleted": Mutation(shutil.rmtree, "found nothing, expected that of commit", history=True),
    "record renamed, pool shrunk": Mutation(shrink_and_rename, "found nothing, expected that of commit", history=True),
    "run parked in another record": Mutation(park_a_run, STAYS, True, history=True),
    "date before the log's own": Mutation(later_run_dir, "no day before that of seed1", True),
    "link with a title": Mutation(by_hand('[idea](idea.md "mine")'), "dead link idea.md"),
    "link by reference": Mutation(by_hand("[idea]: idea.md"), "dead link idea.md"),
}


def outcome(root: Path, mutation: Mutation) -> str:
    """What is said of a mutated record: by a refusing `new --update`, else by `check`; "nothing" for nothing."""
    mutation.do(root / FIRST)
    if mutation.update:
        try:
            call("new", "--records", root, "--update", "First")
        except logs.ToolError as error:
            return str(error)
    return check(root) or "nothing"


def test_the_table_has_every_mutation():
    assert len(MUTATIONS) == 38


@pytest.mark.parametrize("name", [*MUTATIONS, *MORE])
def test_a_mutation_is_found(name, request):
    mutation = (MUTATIONS | MORE)[name]
    root = request.getfixturevalue("with_history" if mutation.history else "without_history")
    assert check(root) == ""
    assert mutation.found in outcome(root, mutation)


def test_what_no_program_finds_is_documented(with_history, without_history):
    """Without a history careful forgeries pass, with one they do not; both stand in the rules."""
    page = " ".join((ROOT / "records/README.md").read_text().split())
    for words in ("text above the marker", "pixels of a plot", "before its first commit", "history that was rewritten"):
        assert words in page, words
    careful = Mutation(in_both_logs(scale_times), "", update=True)
    assert outcome(without_history, careful) == "nothing"
    assert "a log that git has" in outcome(with_history, careful)


# ---- Updates
def test_an_update_says_what_it_changed(with_history):
    """Once it is committed, the next one adds its own; numbers that change unsaid are found after the commit, too."""
    record = with_history / FIRST
    call("new", "--records", with_history, "--update", "First")
    assert "changes" not in read(record)
    call("new", "--records", with_history, "--update", "First", "--entry=note=1")
    assert "Changed by updates" in (record / "README.md").read_text() and check(with_history) == ""
    said = read(record)["changes"]
    assert [update["numbers"] for update in said] == [{"stated.entry.note": [None, 1]}]
    call("new", "--records", with_history, "--update", "First", "--entry=note=2")
    assert [update["numbers"] for update in read(record)["changes"]] == [{"stated.entry.note": [None, 2]}]

    commit(with_history.parent)
    assert check(with_history) == ""
    call("new", "--records", with_history, "--update", "First", "--entry=note=3")
    assert [update["numbers"]["stated.entry.note"] for update in read(record)["changes"]] == [[None, 2], [2, 3]]
    assert check(with_history) == ""

    def forget(result: dict) -> None:
        result["changes"].pop(0)
    edit_result(record, forget)
    assert "earlier changes left out" in check(with_history)


def test_what_changed_is_named_by_its_place():
    old = dict(stated=dict(date="2026-01-01"), groups=dict(a=dict(losses=[1.0, 2.0])), gone=1, changes=[1])
    new = dict(stated=dict(date="2026-01-01"), groups=dict(a=dict(losses=[1.0, 3.0])), picture_sha256="0f", changes=[])
    found = history.entry(old, new)
    assert found == dict(parts=["gone", "groups"], more=0,
                         numbers={"groups.a.losses": [[1.0, 2.0], [1.0, 3.0]], "gone": [1, None]})
    many = dict(runs={str(n): n for n in range(history.KEPT_CHANGES + 5)})
    assert history.entry({}, many)["more"] == 5


def test_changes_that_are_not_said_are_found(with_history):
    def silence(result: dict) -> None:
        del result["changes"]
    call("new", "--records", with_history, "--update", "First", "--entry=note=1")
    edit_result(with_history / FIRST, silence)
    assert "other stated, unsaid" in check(with_history)
    commit(with_history.parent)
    assert history.SAYS_SINCE >= read_date(with_history) or "other stated, unsaid" in check(with_history)


def read_date(root: Path) -> str:
    """Of the newest commit."""
    shown = subprocess.run(["git", "log", "-1", "--format=%cs"], cwd=root, capture_output=True, text=True, check=True)
    return shown.stdout.strip()


def test_a_record_may_be_renumbered_and_a_manifest_may_grow(with_history):
    record = with_history / FIRST
    (record / "logs/manifest.jsonl").write_text('{"type": "note"}\n')
    call("new", "--records", with_history, "--update", "First")
    commit(with_history.parent)
    (record / "logs/manifest.jsonl").write_text('{"type": "note"}\n{"type": "note"}\n')
    call("new", "--records", with_history, "--update", "First")
    assert check(with_history) == ""
    (record / "logs/manifest.jsonl").write_text('{"type": "other"}\n')
    assert "manifest.jsonl: found another content" in check(with_history)
    (record / "logs/manifest.jsonl").write_text('{"type": "note"}\n')

    grown = with_history / "2026-01-02_02_Second/logs/manifest.jsonl"
    for lines in (1, 2):
        grown.write_text(lines * '{"type": "note"}\n')
        commit(with_history.parent)

    def renumber(result: dict) -> None:
        result["stated"]["number"] = "03"
    second = with_history / "2026-01-02_02_Second"
    edit_result(second, renumber)
    second.rename(with_history / "2026-01-02_03_Second")
    call("new", "--records", with_history, "--update", "03")
    (with_history / "README.md").write_text("moved\n")
    found = check(with_history)
    assert "a log that git has" not in found


# ---- The accounts of one run
@pytest.mark.parametrize("old, new, what", [
    ("Python 3.11", "Python 3.12", "python of log.jsonl"),
    ("PyTorch 2.13", "PyTorch 2.12", "torch of log.jsonl"),
    ("world_size 1", "world_size 8", "world_size of log.jsonl"),
    ("1,000 parameters", "1,001 parameters", "params_total of log.jsonl"),
    ("preset: nothing", "preset: lr=2", "changed of log.jsonl"),
    ("step:4/10", "step:5/10", "step 4: found"),
    ("step_avg:9769.", "step_avg:9768.", "(step_avg)"),
    ("train_time:97700ms", "train_time:97701ms", "expected 97701, as log.txt has it"),
    ("563,200 tokens", "563,201 tokens", "tokens of the result"),
    ("800 MiB", "700 MiB", "peak memory of the result"),
    ("Running PyTorch", "running PyTorch", "no hardware, world_size"),
    ("training time", "Training time", "no training time")])
def test_each_line_of_the_text_is_compared(without_history, old, new, what):
    record = without_history / FIRST
    edit(log(record).with_name("log.txt"), old, new)
    assert what in check(without_history)


def test_a_run_agrees_with_its_manifest(without_history):
    record = without_history / FIRST
    ends = []
    for seed, (loss, seconds) in enumerate(zip((2.171, 2.144, 2.162), (99.1, 97.7, 95.7))):
        ends.append(dict(type="end", outcome="done", folder=f"seed{seed}", seed=seed, val_loss=loss, train_s=seconds,
                         wall_s=seconds + 5, source_sha256=layout.sha256(record / "train_gpt.py")))
    manifest = record / "logs/manifest.jsonl"

    def write(**change) -> str:
        manifest.write_text("".join(json.dumps(end | change) + "\n" for end in ends))
        return check(without_history)

    assert "seed1" not in write()
    assert "seed1, loss: found 2.144, expected 2.14," in write(val_loss=2.14)
    assert "seed1, seconds: found 97.7, expected 97," in write(train_s=97)
    assert "seed1, seconds: found 97.7, expected less than 97," in write(wall_s=97)
    assert "seed1, seed: found 1, expected 3," in write(seed=3)
    assert "seed1, source_sha256: found" in write(source_sha256="0" * 64)


@pytest.mark.parametrize("kind, change, what", [
    ("header", dict(changed=dict(lr="0.2")), "lr of log.jsonl: found 0.1, expected 0.2, as its flag says"),
    ("header", dict(changed=dict(run_dir="x")), "expected x, as its flag says"),
    ("header", dict(seed=4), "seed of log.jsonl"),
    ("step", dict(tokens=5), "tokens of the result: found 563200, expected 5,"),
    ("result", dict(val_loss=2.0), "val_loss of the result: found 2.0, expected 2.144"),
    ("result", dict(train_time_ms=1.0), "train_time_ms of the result: found 1.0, expected 97700"),
    ("result", dict(steps=9), "steps of the result: found 9, expected 10"),
    ("step", dict(train_time_ms=5.0), "time at step 2: found 5.0, expected no less than")])
def test_a_log_agrees_with_itself(without_history, kind, change, what):
    def edit_one(event: dict) -> None:
        if event["type"] == kind and event.get("step") in (None, 2, 10):
            event.update(change)
    change_events(log(without_history / FIRST), edit_one)
    assert what in check(without_history)


def test_flags_that_are_no_numbers_are_left_alone():
    """And what the trainer fills in, or a time budget decides."""
    config = dict(stages=[1, 2], device="cpu", lr=0.5, padded_vocab=128, num_scheduled_steps=9, time_budget=60.0)
    flags = dict(stages="1;2", device="cpu", lr="5e-1", padded_vocab="0", num_scheduled_steps="8")
    assert not list(evidence.unlike_flags(dict(config=config, changed=flags)))
    config["time_budget"] = 0.0
    assert [what for what, _, _ in evidence.unlike_flags(dict(config=config, changed=flags))] == [
        "num_scheduled_steps of log.jsonl"]


def test_two_units_of_a_loss():
    losses = [dict(type="val", step=step, val_loss=loss, val_bpb=loss * 0.73) for step, loss in ((0, 7.6), (9, 2.1))]
    assert not list(evidence.two_units(losses))
    losses[1]["val_loss"] = 2.09
    assert [what for what, _, _ in evidence.two_units(losses)] == ["loss at step 9"]


# ---- Pictures
def png(rows: bytes, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    head = struct.pack(">IIBBBBB", 2, height, 8, 0, 0, 0, 0)
    return evidence.PNG + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_a_picture_is_whole(published):
    drawn = (published / "records" / FIRST / "loss.png").read_bytes()
    good = png(b"\0ab\0cd", 2)
    assert evidence.is_png(drawn) and evidence.is_png(good)
    spoiled = [b"", good[:-4], good[:20] + b"x" + good[21:], drawn[:-30], png(b"\0ab\0c", 2), SOURCE.encode()]
    assert not [data for data in spoiled if evidence.is_png(data)]

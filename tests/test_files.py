"""Saves and checkpoints: what damage does to a run that reads them, what a run that writes them leaves behind, and runs
that go on from them.

One run with tables in both homes is the sound one; each case changes one thing of a copy. `seal` writes a manifest that
vouches for the change, so that what is looked at is the content.
"""
import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import (Run, SimulatedTime, before_flush, expect_error, full_disk, losses, make_comm, make_engine,
                    no_large_files, noop, preset, recorded_writes, run, unequal, weights)

import train_gpt as tg

TABLES = "trigram_embed 3 500; more_bigram_embed 2 300 8 1 host"
SHORT = ("--max_steps=1", "--val_every=0", "--sample_tokens=0")
NO_TABLES = SimpleNamespace(comm=make_comm(), tables={})       # an engine as far as a folder without rows needs one
SMALL_PIECES = 1 << 14                   # bytes, more than 64 rows have: several files of each table

pytestmark = pytest.mark.usefixtures("small_pieces")

@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A run of 5 steps with a save, and checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("sound")
    done = run(folder / "run", f"--tables={TABLES}", "--max_steps=5", "--checkpoint_every=2", "--sample_tokens=0",
               f"--save={folder / 'save'}")
    assert done.status == 0, done.err
    return folder

@pytest.fixture
def save(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound / "save", tmp_path / "save"))

@pytest.fixture
def newest(sound, tmp_path) -> Path:
    """The newest checkpoint of a copied run directory."""
    shutil.copytree(sound / "run", tmp_path / "run")
    return tmp_path / "run" / tg.CHECKPOINT_DIR / "step-0000004"

def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())

def seal(folder: Path) -> None:
    """Let the manifest vouch for the files as they are now."""
    files = {path.name: dict(sha256=hashlib.sha256(path.read_bytes()).hexdigest())
             for path in folder.iterdir() if path.name != tg.MANIFEST_FILE and path.is_file()}
    (folder / tg.MANIFEST_FILE).write_text(json.dumps(dict(format=2, files=files)))

def change(path: Path, edit) -> None:
    """Replace the content of a file of tensors by what `edit` makes of it, with the right hash."""
    content = edit(torch.load(path, weights_only=True))
    path.unlink()                                             # it may still be mapped
    torch.save(content, path)
    seal(path.parent)

def sample(folder: Path) -> None:
    tg.sample_from_save(tg.load_config([f"--sample={folder}", "--sample_tokens=2"]))

def load(newest: Path, **changes) -> int:
    """Load the newest sound checkpoint; return its step."""
    cfg = preset(**dict(tables=tg.parse_value("tables", TABLES)) | changes)
    return tg.load_checkpoint(newest.parent.parent, make_engine(cfg))["log"]["steps_done"]

def first(folder: Path, pattern: str) -> Path:
    return min(folder.glob(pattern))


# ---- Damage ----------------------------------------------------------------------------------------------------------
def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)

def replaced_by(make):
    def damage(path: Path) -> None:
        path.unlink()
        make(path)
    return damage

def swapped(path: Path) -> None:
    """With another of its folder."""
    other = next(other for other in sorted(path.parent.glob("*.pt")) if other != path)
    content = other.read_bytes()
    path.rename(other)
    path.write_bytes(content)

DAMAGES = dict(flipped=flipped, cut=cut, gone=Path.unlink, fifo=replaced_by(os.mkfifo),
               directory=replaced_by(Path.mkdir), swapped=swapped)

ROWS_FILE = "rows-trigram*-1.pt"
# A manifest of other bytes or of another folder is one whose hashes do not fit: the files' own cases.
DAMAGED = [(damage, *names) for damage in DAMAGES for names in (("weights.pt", "run.pt"), (ROWS_FILE, ROWS_FILE))]
DAMAGED += [(damage, tg.MANIFEST_FILE, tg.MANIFEST_FILE) for damage in DAMAGES if damage not in ("flipped", "swapped")]

@pytest.mark.parametrize("damage, in_save, in_run", DAMAGED)
def test_read_tensors__damage(save, newest, capsys, damage, in_save, in_run):
    """A save is refused by the file's name; of checkpoints the one before is taken, aloud."""
    path = first(save, in_save)
    DAMAGES[damage](path)
    without_manifest = in_save == tg.MANIFEST_FILE and damage != "cut"            # it then vouches for nothing
    with expect_error(tg.DataError, "weights.pt" if without_manifest else path.name):
        sample(save)
    path = first(newest, in_run)
    DAMAGES[damage](path)
    assert load(newest) == 2
    said = capsys.readouterr().out
    assert str(newest) in said and "warning: skipping checkpoint step-0000004" in said
    assert without_manifest or str(path) in said

def test_load_checkpoint__none_is_whole(newest):
    for path in newest.parent.iterdir():
        cut(path / "run.pt")
    with expect_error(tg.DataError, "step-0000002", "an intact checkpoint"):
        load(newest)

def test_load_checkpoint__ranks_see_other_checkpoints(newest, monkeypatch):
    def two(self: tg.Communicator, fact: object) -> list:
        return [fact, dict(checkpoints="none")] if isinstance(fact, dict) else [fact, fact]
    ranks = make_engine(preset(), world_size=2)
    monkeypatch.setattr(tg.Communicator, "all_gather", two)
    with expect_error(tg.ConfigError, "none on rank 1"):
        tg.load_checkpoint(newest.parent.parent, ranks)

class Evil:
    """What a pickle may hold: a call that is made when it is loaded."""
    def __reduce__(self):
        return os.mkdir, ("evil_was_here",)

@pytest.mark.parametrize("content", [b"junk" * 1000, pickle.dumps(Evil()), None], ids=["junk", "bare", "zip"])
def test_read_tensors__runs_no_code(save, content, monkeypatch):
    """The hash is right; and nobody is told to let it."""
    path = save / "weights.pt"
    torch.save(dict(attn=Evil()), path)
    path.write_bytes(content or path.read_bytes())
    seal(save)
    monkeypatch.chdir(save)
    with expect_error(tg.DataError, "weights.pt", "unreadable or with pickled code") as caught:
        sample(save)
    assert "weights_only" not in str(caught.value) and not Path("evil_was_here").exists()


# ---- Other content with right hashes ---------------------------------------------------------------------------------
def on(name: str, edit_entry=None):
    """Return a change of one entry, or its removal."""
    def edit(tensors: dict) -> dict:
        others = {label: x for label, x in tensors.items() if label != name}
        return others if edit_entry is None else others | {name: edit_entry(tensors.get(name))}
    return edit

def fewer(x: torch.Tensor) -> torch.Tensor:
    return x[:-1].clone()

def narrow(x: torch.Tensor) -> torch.Tensor:
    return x[:, 1:].clone()

def beyond(ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids == ids.max(), 500, ids)

OTHER = {                                # part, case -> its change, what is named
    ("weights", "shape"): (on("attn", fewer), "attn"), ("weights", "dtype"): (on("attn", torch.Tensor.double), "attn"),
    ("weights", "a table of fewer rows"): (on("bigram_embed", fewer), "bigram_embed"),
    ("weights", "unknown"): (on("new", lambda _: torch.zeros(1)), "new"), ("weights", "missing"): (on("mlp"), "mlp"),
    ("weights", "nothing"): (noop, "Error"),
    ("moments", "missing"): (on("embed.v"), "embed.v"), ("moments", "shape"): (on("attn.momentum", fewer), "attn.mom"),
    ("moments", "dtype"): (on("scalars.m", torch.Tensor.double), "scalars.m"),
    ("rows", "beyond"): (on("ids", beyond), ""), ("rows", "no ids"): (on("ids"), ""),
    ("rows", "narrow"): (on("rows", narrow), ""), ("rows", "fewer"): (on("rows", fewer), ""),
    ("state of rows", "no last"): (on("last"), ""), ("state of rows", "fewer v"): (on("v", fewer), ""),
    ("state of rows", "i64 last"): (on("last", torch.Tensor.long), "")}

@pytest.mark.parametrize("part, case", OTHER)
def test_check_tensors__other_content(save, newest, capsys, part, case):
    """A save is refused; of checkpoints the one before is taken."""
    edit, named = OTHER[part, case]
    if part != "moments":                                     # a save has none
        path = first(save, "weights.pt" if part == "weights" else "rows-trigram*-1.pt")
        change(path, edit)
        with expect_error(tg.DataError, str(save), named):
            sample(save)
    if part in ("weights", "moments"):
        change(newest / "run.pt", on("state", edit))
    else:
        change(first(newest, "rows-trigram*-1.pt"), edit)
    assert load(newest) == 2
    said = capsys.readouterr().out
    assert str(newest) in said and named in said

@pytest.mark.parametrize("changes", [dict(dtype="float64"), dict(bigram_rows=2000),
                                     dict(tables=tg.parse_value("tables", TABLES.replace("500", "400")))], ids=str)
def test_load_checkpoint__of_another_model(newest, changes):
    with expect_error(tg.DataError, "an intact checkpoint"):
        load(newest, **changes)

def test_sample_from_save__damaged_settings(save):
    path = save / tg.SETTINGS_FILE
    path.write_text(path.read_text().replace('"seed": "0"', '"seed": "1"'))
    with expect_error(tg.DataError, tg.SETTINGS_FILE, "as in manifest.json"):
        sample(save)


# ---- Writing ---------------------------------------------------------------------------------------------------------
def test_write_directory__the_manifest_names_every_file(sound):
    for folder in (sound / "save", sound / "run" / tg.CHECKPOINT_DIR / "step-0000004"):
        manifest = json.loads((folder / tg.MANIFEST_FILE).read_text())
        assert manifest["format"] == 2 and sorted([*manifest["files"], tg.MANIFEST_FILE]) == names(folder)
        for name, entry in manifest["files"].items():
            content = (folder / name).read_bytes()
            assert entry == dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            assert len(content) < SMALL_PIECES + 10_000 or not name.startswith("rows")
        for label in ("trigram_embed", "more_bigram_embed"):
            assert (folder / f"rows-{label}-0of1-1.pt").exists()
    assert names(sound / "run" / tg.CHECKPOINT_DIR) == ["step-0000002", "step-0000004"]

def test_write_directory__all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = recorded_writes(monkeypatch)
    tg.write_directory(tmp_path / "new", "id", {"a.bin": b"x", "b.pt": dict(x=torch.ones(3))}, NO_TABLES)
    inodes = [(tmp_path / "new" / name).stat().st_ino for name in ("a.bin", "b.pt", tg.MANIFEST_FILE, "")]
    assert calls == [*inodes, "new", tmp_path.stat().st_ino]

@pytest.mark.parametrize("at", range(5))
def test_write_directory__a_disk_that_fails_leaves_nothing(tmp_path, monkeypatch, at):
    """At any flush before the name: of a file, of the manifest, of the folder."""
    left = iter(range(at, -2, -1))

    def failing(handle: int) -> None:
        if next(left) == 0:
            full_disk()

    monkeypatch.setattr(os, "fsync", failing)
    contents = {f"{number}.pt": dict(x=torch.ones(3)) for number in range(3)}
    with expect_error(tg.RunError, "No space left on device"):
        tg.write_directory(tmp_path / "new", "id", contents, NO_TABLES)
    assert names(tmp_path) == []

@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_write_directory__a_file_system_that_cannot_flush_folders_loses_nothing(tmp_path, monkeypatch, code):
    """A save and checkpoints are made all the same. A file that cannot be flushed is an error, by any code."""
    fsync = os.fsync

    def refusing(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    def failing(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refusing)
    done = run(tmp_path / "run", "--max_steps=4", "--checkpoint_every=2", "--sample_tokens=0", "--val_every=0",
               f"--save={tmp_path / 'save'}")
    assert (done.status, done.err) == (0, "") and f"weights saved in {tmp_path / 'save'}" in done.lines
    assert names(tmp_path) == ["run", "save"] and names(tmp_path / "run" / tg.CHECKPOINT_DIR) == ["step-0000002"]
    monkeypatch.setattr(os, "fsync", failing)
    with expect_error(tg.RunError, os.strerror(code)):
        tg.write_directory(tmp_path / "new", "id", {"a.bin": b"x"}, NO_TABLES)

def take_by_folder(folder: Path) -> None:
    (folder / "theirs").mkdir(parents=True)

@pytest.mark.parametrize("take", [Path.touch, take_by_folder])
def test_write_directory__a_name_that_was_taken_meanwhile_stays_as_it_is(tmp_path, monkeypatch, take):
    folder = tmp_path / "new"
    def taken(path: Path) -> None:
        if path.name == "mine":
            take(folder)

    before_flush(monkeypatch, taken)
    with expect_error(tg.RunError, str(folder)):
        tg.write_directory(folder, "id", dict(mine=b""), NO_TABLES)
    assert names(tmp_path) == ["new"] and (folder.is_file() or names(folder) == ["theirs"])

@pytest.mark.parametrize("where, found", [
    ("run", "the path already exists"), ("file", "the path already exists"), (".", "the path already exists"),
    ("/proc/new", "No such file"), ("x" * 300, "File name too long"), ("file/new", "Not a directory")])
def test_preflight__a_save_that_cannot_be_written_ends_before_training(tmp_path, where, found):
    for make, name in ((Path.touch, "file"), (Path.mkdir, "run")):
        make(tmp_path / name)
    done = run(tmp_path / "run", *SHORT, f"--save={tmp_path / where}")
    assert done.status == 2 and done.err.startswith("ConfigError") and found in done.err
    assert names(tmp_path) == ["file", "run"] and names(tmp_path / "run") == []

def test_finish_run__a_full_disk(tmp_path, monkeypatch):
    before_flush(monkeypatch, full_disk, "elsewhere")
    folder = tmp_path / "elsewhere"
    done = run(tmp_path / "run", *SHORT, f"--save={folder}")
    assert done.status == 1 and done.events[-1]["type"] == "result", "not aborted"
    assert json.loads(done.out.splitlines()[-1])["type"] == "result" and "No space left on device" in done.err
    assert f"weights saved in {tmp_path / 'run/save'}" in done.lines
    assert names(tmp_path) == ["run"]
    sample(tmp_path / "run/save")

def test_finish_run__room_nowhere_takes_no_result_along(tmp_path):
    with no_large_files(300_000):
        done = run(tmp_path / "run", *SHORT, f"--save={tmp_path / 'save'}")
    assert done.status == 1 and done.events[-1]["type"] == "result"
    assert "weights not saved" in done.lines
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["log.jsonl", "log.txt", "settings.json", "train_gpt.py"]

@pytest.mark.parametrize("where", ["checkpoints/step-0000002", "save"])
@pytest.mark.parametrize("number, cause", [(signal.SIGTERM, "terminated by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_end__a_signal_while_a_folder_is_written_leaves_nothing_of_it(tmp_path, monkeypatch, where, number, cause):
    def end(path: Path) -> None:
        if path.name == tg.MANIFEST_FILE:
            signal.raise_signal(number)
            time.sleep(100)

    before_flush(monkeypatch, end, Path(where).name)
    done = run(tmp_path, "--max_steps=3", "--checkpoint_every=2", "--sample_tokens=0", f"--save={tmp_path / 'save'}")
    assert done.status == 128 + number and cause in done.err and cause in done.of("aborted")[0]["cause"]
    assert not list(tmp_path.rglob("*.part")) and not (tmp_path / where).exists()

def test_write_checkpoint__one_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    before_flush(monkeypatch, full_disk, "step-0000004")
    done = run(tmp_path / "run", "--max_steps=8", "--checkpoint_every=2", "--sample_tokens=0")
    assert done.status == 0 and "warning: continuing without this checkpoint" in done.out, done.err
    assert names(tmp_path / "run" / tg.CHECKPOINT_DIR) == ["step-0000002", "step-0000006"]

def test_write_checkpoint__only_those_of_earlier_steps_are_removed(tmp_path):
    """A stranger's later ones do not push out what was just written."""
    cfg = preset()
    folder = tmp_path / tg.CHECKPOINT_DIR
    for step in (2, 4, 100, 200):
        (folder / f"step-{step:07d}").mkdir(parents=True)
    tg.write_checkpoint(tmp_path, "id", {}, make_engine(cfg), tg.Schedule(cfg).at(6))
    assert names(folder) == ["step-0000004", "step-0000006", "step-0000100", "step-0000200"]

def test_write_checkpoint__off_the_clock(tmp_path, monkeypatch):
    """By a simulated clock, on which only a checkpoint takes long."""
    clock = SimulatedTime(monkeypatch, tick=1e-6)
    write = tg.write_checkpoint

    def slowly(*rest) -> None:
        clock.work(700)
        write(*rest)

    monkeypatch.setattr(tg, "write_checkpoint", slowly)
    done = run(tmp_path / "run", "--checkpoint_every=10", "--sample_tokens=0")
    phase, = [e for e in done.of("phase") if e["name"] == "checkpoint"]
    assert 700_000 < phase["ms"] < 701_000 and not phase["timed"]
    assert done.of("step")[-1]["step"] == 12 and 0 < done.of("result")[0]["train_time_ms"] < 1000


# ---- Resumed runs: at another number of ranks in test_table_files.py ------------------------------------------------
def test_resume__equals_an_uninterrupted_run(tmp_path):
    """To the bit, with the lines and the clock up to its checkpoint; and it may be cut and resumed again."""
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    run(whole, "--seed=6", f"--save={tmp_path / 'whole_save'}", "--sample_tokens=0")
    run(begun, "--seed=6", "--max_steps=9", "--checkpoint_every=2", "--sample_tokens=0")
    assert names(begun / tg.CHECKPOINT_DIR) == ["step-0000006", "step-0000008"]
    done = run(tmp_path / "a", f"--resume={begun}", "--max_steps=0", f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    assert losses(done.folder) == losses(whole) and weights(tmp_path / "save") == weights(tmp_path / "whole_save")
    before = Run(begun, 0, "", "")
    assert done.events[0] == before.events[0]
    times = [e["train_time_ms"] for e in done.of("step")]
    assert times[:8] == [e["train_time_ms"] for e in before.of("step")][:8] and times == sorted(times)
    assert [(e["step"], e["source"], e["seed"]) for e in done.of("resumed")] == [(8, str(begun), 6)]

    run(tmp_path / "b", f"--resume={begun}", "--max_steps=11", "--checkpoint_every=3")
    again = run(tmp_path / "c", f"--resume={tmp_path / 'b'}", "--max_steps=0")
    assert losses(again.folder) == losses(whole) and [e["step"] for e in again.of("resumed")] == [8, 10]
    assert again.of("resumed")[1]["changed"]["checkpoint_every"] == "3", "flags are those of the run before"

def test_resume__in_bf16_with_its_mantissas(tmp_path):
    """The 16 further bits of a NorMuon bank in bf16 change no weight by themselves, but in the next updates."""
    flags = "--dtype=bfloat16", "--sample_tokens=0", "--checkpoint_every=2"
    run(tmp_path / "whole", *flags, f"--save={tmp_path / 'whole_save'}")
    run(tmp_path / "begun", *flags, "--max_steps=7")
    done = run(tmp_path / "again", f"--resume={tmp_path / 'begun'}", "--max_steps=0", f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    assert [e["step"] for e in done.of("resumed")] == [6]
    assert losses(done.folder) == losses(tmp_path / "whole")
    assert weights(tmp_path / "save") == weights(tmp_path / "whole_save")
    whole, again = (torch.load(folder / tg.CHECKPOINT_DIR / "step-0000010/run.pt")["state"]
                    for folder in (tmp_path / "whole", done.folder))
    assert unequal(again, whole) == [] and whole["mlp.mantissa"].count_nonzero() > 1000

def test_check_resume__what_differs_is_said_and_written(newest, tmp_path):
    def edit(facts: dict) -> dict:
        return facts | dict(source_sha256="0" * 64, seed="7", adam_lr="0.5")
    change(newest / "run.pt", on("fingerprint", edit))
    source = newest.parent.parent
    done = run(tmp_path / "again", f"--resume={source}", "--max_steps=6", "--sample_tokens=0")
    assert done.status == 0, done.err
    resumed, = done.of("resumed")
    assert sorted(resumed["differs"]) == ["adam_lr", "seed", "source_sha256"]
    assert resumed["differs"]["seed"] == ["7", "0"]
    assert "warning: adam_lr differs from the earlier run: 0.5 then, 0.008 now" in done.lines
    assert any(line.startswith(f"resuming {source} after step 4") for line in done.lines)
    for flag, parts in (("--train_files=formula:512:511:50000:2", ["data with --resume"]),
                        ("--max_steps=3", ["--max_steps", "4 or more"])):
        other = run(tmp_path / "other", f"--resume={source}", flag)
        assert other.status == 2 and all(part in other.err for part in parts), other.err
        assert not (tmp_path / "other").exists()

"""Saves and checkpoints: what damage does to a run that reads them, and what a run that writes them leaves behind.

One run with tables in both homes is the sound one; each case changes one thing of a copy. `seal` writes a manifest that
vouches for the change, so that what is looked at is the content.
"""
from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import multiprocessing
import operator
import os
import pickle
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import Run, executor, fabric, losses, preset, recorded_writes, refused
from common import run_apart as run

import train_gpt as tg

TABLES = "trigram_embed 3 500; more_bigram_embed 2 300 8 1 host"
LABELS = ("more_bigram_embed", "trigram_embed")
SHORT = ("--max_steps=1", "--val_every=0", "--sample_tokens=0")
SMALL_PIECES = 1 << 14                   # bytes, more than 64 rows have: several files of each table


def no_warm_up(*_: object) -> None:
    """It leaves no trace."""


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "PIECE_ROWS", 64)
        patch.setattr(tg, "warm_up", no_warm_up)
        yield


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
def checkpoints(sound, tmp_path) -> Path:
    """The checkpoints of a copied run directory."""
    shutil.copytree(sound / "run", tmp_path / "run")
    return tmp_path / "run" / tg.CHECKPOINTS


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def name_of(case: object) -> str:
    return getattr(case, "__name__", str(case))


def config(**changes: Any) -> tg.Config:
    return preset(tables=tg.parse_value("tables", TABLES), **changes)


def seal(folder: Path) -> None:
    """Let the manifest vouch for the files as they are now."""
    files = {path.name: dict(sha256=hashlib.sha256(path.read_bytes()).hexdigest())
             for path in folder.iterdir() if path.name != tg.MANIFEST and path.is_file()}
    (folder / tg.MANIFEST).write_text(json.dumps(dict(format=2, files=files)))


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Replace the content of a file of tensors by what `edit` makes of it, with the right hash."""
    content = edit(torch.load(path, weights_only=True))
    path.unlink()                                             # it may still be mapped
    torch.save(content, path)
    seal(path.parent)


def refuse_sample(folder: Path, *parts: str) -> str:
    def sample() -> None:
        tg.sample_saved(tg.parse_flags([f"--sample={folder}", "--sample_tokens=2"])[1])
    return refused(tg.DataError, sample, *parts)


def is_sound(folder: Path) -> bool:
    """Whether a save can be sampled from."""
    done = run(folder, f"--sample={folder}", "--sample_tokens=2")
    return done.status == 0 and done.out.startswith("token ids")


def taken(run_dir: Path, capsys, cfg: tg.Config | None = None) -> tuple[int, str]:
    """(step of the checkpoint that is taken, what is said about others)."""
    content = tg.load_checkpoint(run_dir, executor(cfg or config()))
    return content["log"]["done"], capsys.readouterr().out


# ---- Damage ----------------------------------------------------------------------------------------------------------

def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def gone(path: Path) -> None:
    path.unlink()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def swapped(path: Path) -> None:
    """With another of its folder."""
    other = next(other for other in sorted(path.parent.glob("*.pt")) if other != path)
    content = other.read_bytes()
    path.rename(other)
    path.write_bytes(content)


DAMAGES = [flipped, cut, gone, fifo, directory, loop, swapped]


def first(folder: Path, pattern: str) -> Path:
    return min(folder.glob(pattern))


@pytest.mark.parametrize("damage", DAMAGES, ids=name_of)
@pytest.mark.parametrize("pattern", ["weights.pt", "rows-trigram*-1.pt"])
def test_read_tensors__a_damaged_save_is_refused_by_name(save, pattern, damage):
    path = first(save, pattern)
    damage(path)
    refuse_sample(save, path.name)


@pytest.mark.parametrize("damage", DAMAGES, ids=name_of)
@pytest.mark.parametrize("pattern", ["run.pt", "rows-trigram*-1.pt"])
def test_load_checkpoint__damage_leads_to_the_one_before(checkpoints, capsys, pattern, damage):
    path = first(checkpoints / "step-0000004", pattern)
    damage(path)
    step, said = taken(checkpoints.parent, capsys)
    assert step == 2 and str(path) in said and "the checkpoint before step-0000004 is taken" in said


@pytest.mark.parametrize("damage", [cut, gone, fifo, directory], ids=name_of)
def test_read_manifest__damage(save, checkpoints, capsys, damage):
    damage(save / tg.MANIFEST)
    refuse_sample(save, tg.MANIFEST if damage is cut else "weights.pt")
    damage(checkpoints / "step-0000004" / tg.MANIFEST)
    assert taken(checkpoints.parent, capsys)[0] == 2


def test_load_checkpoint__a_read_error_names_the_file_and_the_one_before_is_taken(checkpoints, capsys, monkeypatch):
    sha256 = tg.file_sha256

    def failing(path: Path) -> str:
        if path.parent.name == "step-0000004":
            raise OSError(errno.EIO, "Input/output error")
        return sha256(path)

    monkeypatch.setattr(tg, "file_sha256", failing)
    step, said = taken(checkpoints.parent, capsys)
    assert step == 2 and f"{checkpoints}/step-0000004/run.pt" in said and "Input/output error" in said


def test_load_checkpoint__none_is_whole(checkpoints):
    for path in checkpoints.iterdir():
        cut(path / "run.pt")
    load = functools.partial(tg.load_checkpoint, checkpoints.parent, executor(config()))
    refused(tg.DataError, load, "step-0000002", "a whole one")


def test_load_checkpoint__ranks_see_other_checkpoints(checkpoints, monkeypatch):
    def two(self: tg.Fabric, fact: object) -> list:
        return [fact, dict(checkpoints="none")] if isinstance(fact, dict) else [fact, fact]
    ranks = executor(config(), world=2)
    monkeypatch.setattr(tg.Fabric, "gather", two)
    load = functools.partial(tg.load_checkpoint, checkpoints.parent, ranks)
    refused(tg.ConfigError, load, "checkpoints", "none on rank 1")


class Evil:
    """What a pickle may hold: a call that is made when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("evil_was_here",)


@pytest.mark.parametrize("content", [b"", b"junk" * 1000, pickle.dumps(Evil()), Evil()],
                         ids=["empty", "junk", "bare", "zip"])
def test_read_tensors__runs_no_code(save, content, monkeypatch):
    """With the right hash; and nobody is told to let it."""
    path = save / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(dict(attn=content), path)
    seal(save)
    monkeypatch.chdir(save)
    message = refuse_sample(save, "weights.pt", "damaged, unreadable or with code in it")
    assert "weights_only" not in message and not Path("evil_was_here").exists()


# ---- Other content with right hashes ---------------------------------------------------------------------------------

def without(name: str) -> Callable[[dict], dict]:
    def edit(tensors: dict) -> dict:
        return {label: x for label, x in tensors.items() if label != name}
    return edit


def on(name: str, edit_entry: Callable) -> Callable[[dict], dict]:
    """A change of one entry."""
    def edit(tensors: dict) -> dict:
        return tensors | {name: edit_entry(tensors[name])}
    return edit


def always(value: object) -> Callable[[object], object]:
    """A change to that value, whatever it was."""
    def edit(_: object) -> object:
        return value
    return edit


def piece(at: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(x: torch.Tensor) -> torch.Tensor:
        return x[at].clone()
    return edit


def with_unknown(tensors: dict) -> dict:
    return tensors | dict(new=tensors["attn"])


WEIGHTS = {                              # case -> (change of weights.pt, what is named)
    "shape": (on("attn", piece(np.s_[:1])), "attn"),
    "one number for all": (on("scalars", always(torch.zeros(1))), "scalars"),
    "a table of fewer rows": (on("bigram_embed", piece(np.s_[:-1])), "bigram_embed"),
    "dtype": (on("attn", torch.Tensor.double), "attn"), "unknown": (with_unknown, "new"),
    "missing": (without("mlp"), "mlp"), "a number": (on("embed", always(3)), "AttributeError"),
    "nothing": (always(None), "AttributeError"), "one tensor": (operator.itemgetter("attn"), "AttributeError")}


@pytest.mark.parametrize("case", WEIGHTS)
def test_check_tensors__other_content(save, checkpoints, capsys, case):
    edit, named = WEIGHTS[case]
    change(save / "weights.pt", edit)
    refuse_sample(save, "weights.pt", named)

    def edit_state(content: dict) -> dict:
        return content | dict(state=content["state"] | dict(weights=edit(content["state"]["weights"])))
    change(checkpoints / "step-0000004/run.pt", edit_state)
    step, said = taken(checkpoints.parent, capsys)
    assert step == 2 and "step-0000004/run.pt" in said and (named in said or "TypeError" in said)


MOMENTS = {
    "missing": without("embed.v"), "shape": on("attn.momentum", piece(np.s_[:1])),
    "dtype": on("scalars.m", torch.Tensor.double), "none": always(None)}


@pytest.mark.parametrize("case", [*MOMENTS, "log", "state"])
def test_load_checkpoint__other_content_leads_to_the_one_before(checkpoints, capsys, case):
    def edit(content: dict) -> dict:
        if case in MOMENTS:
            state = content["state"]
            return content | dict(state=state | dict(moments=MOMENTS[case](state["moments"])))
        return without(case)(content)
    change(checkpoints / "step-0000004/run.pt", edit)
    step, said = taken(checkpoints.parent, capsys)
    assert step == 2 and "step-0000004" in said


def put(x: torch.Tensor, at: int, value: float) -> torch.Tensor:
    changed = x.clone()
    changed[at] = value
    return changed


ROWS = {                                 # case -> change of a file of rows
    "beyond": on("ids", functools.partial(put, at=-1, value=500)),
    "no ids": without("ids"), "words": on("ids", always("0 1")), "narrow": on("rows", piece(np.s_[:, 1:])),
    "fewer": on("rows", piece(np.s_[1:])), "nothing": always(7)}
STATES = {                               # of a checkpoint alone
    "f64 rows": on("rows", torch.Tensor.double), "no v": without("v"), "no last": without("last"),
    "fewer v": on("v", piece(np.s_[1:])), "i64 last": on("last", torch.Tensor.long)}


@pytest.mark.parametrize("case", [*ROWS, *STATES])
def test_own_rows__other_content(save, checkpoints, capsys, case):
    edit = (ROWS | STATES)[case]
    path = first(checkpoints / "step-0000004", "rows-trigram*-1.pt")
    change(path, edit)
    step, said = taken(checkpoints.parent, capsys)
    assert step == 2 and "step-0000004" in said
    if case in ROWS:
        change(first(save, "rows-trigram*-1.pt"), edit)
        refuse_sample(save, str(save))


def test_load_checkpoint__of_another_model(checkpoints):
    """Other sizes, types and tables."""
    for changes in (dict(model_dim=64, head_dim=32), dict(dtype="float64"), dict(bigram_rows=2000)):
        load = functools.partial(tg.load_checkpoint, checkpoints.parent, executor(config(**changes)))
        refused(tg.DataError, load, "a whole one")
    fewer = preset(tables=tg.parse_value("tables", TABLES.replace("500", "400")))
    load = functools.partial(tg.load_checkpoint, checkpoints.parent, executor(fewer))
    refused(tg.DataError, load, "a whole one")


SETTINGS = [dict(dtype="3"), dict(num_heads="2.0"), dict(stages="none"), dict(no_such="1")]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_read_settings__are_checked_like_flags(save, changes):
    path = save / tg.SETTINGS
    settings = json.loads(path.read_text())
    settings["flags"] |= changes
    path.write_text(json.dumps(settings))
    seal(save)
    with pytest.raises((tg.DataError, tg.ConfigError)) as caught:
        tg.sample_saved(tg.parse_flags([f"--sample={save}"])[1])
    assert list(changes)[0] in str(caught.value) or tg.SETTINGS in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"preset"', "\xff"], ids="{:.8}".format)
def test_read_settings__that_are_none(save, text):
    (save / tg.SETTINGS).write_text(text, "latin-1")
    refuse_sample(save, tg.SETTINGS)


def test_sample_saved__damaged_settings(save):
    path = save / tg.SETTINGS
    path.write_text(path.read_text().replace('"seed": "0"', '"seed": "1"'))
    refuse_sample(save, tg.SETTINGS, "says manifest.json")


def test_read_settings__of_an_older_trainer(tmp_path):
    """Its saves had a config.json, its run directories no settings."""
    (tmp_path / "config.json").touch()
    (tmp_path / "weights.pt").touch()
    refuse_sample(tmp_path, tg.SETTINGS, "one of an older trainer needs that trainer")
    (tmp_path / "log.jsonl").touch()
    refused(tg.DataError, functools.partial(tg.parse_flags, [f"--resume={tmp_path}"]), tg.SETTINGS,
            "one of an older trainer needs that trainer")


def test_sample_saved__weights_without_finite_logits(save):
    def all_huge(tensors: dict) -> dict:
        return {label: torch.full_like(x, 1e38) for label, x in tensors.items()}
    change(save / "weights.pt", all_huge)
    done = run(save, f"--sample={save}")
    assert done.status == 1 and done.err.startswith("RunError: sample\n  found:    logits that are not finite")


# ---- Writing ---------------------------------------------------------------------------------------------------------

def test_write_folder__the_manifest_names_every_file(sound):
    for folder in (sound / "save", sound / "run" / tg.CHECKPOINTS / "step-0000004"):
        manifest = json.loads((folder / tg.MANIFEST).read_text())
        assert manifest["format"] == 2 and sorted([*manifest["files"], tg.MANIFEST]) == names(folder)
        for name, entry in manifest["files"].items():
            content = (folder / name).read_bytes()
            assert entry == dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            assert len(content) < SMALL_PIECES + 10_000 or not name.startswith("rows")
        for label in LABELS:
            assert len(list(folder.glob(f"rows-{label}-0of1-*.pt"))) > 1
    assert names(sound / "run" / tg.CHECKPOINTS) == ["step-0000002", "step-0000004"]


def test_write_folder__all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = recorded_writes(monkeypatch)
    contents = [("a.bin", b"x"), ("b.pt", dict(x=torch.ones(3)))]
    tg.write_folder(tmp_path / "new", "id", contents, fabric())
    inodes = [(tmp_path / "new" / name).stat().st_ino for name in ("a.bin", "b.pt", tg.MANIFEST, "")]
    assert calls == [*inodes, "new", tmp_path.stat().st_ino]


@pytest.mark.parametrize("at", range(5))
def test_write_folder__a_disk_that_fails_leaves_nothing(tmp_path, monkeypatch, at):
    """At any flush before the name: of a file, of the manifest, of the folder."""
    left = iter(range(at, -2, -1))

    def failing(handle: int) -> None:
        if next(left) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    contents = [(f"{number}.pt", dict(x=torch.ones(3))) for number in range(3)]
    write = functools.partial(tg.write_folder, tmp_path / "new", "id", contents, fabric())
    refused(tg.RunError, write, "No space left on device")
    assert names(tmp_path) == []


@pytest.mark.parametrize("taken_by", [Path.mkdir, Path.touch], ids=["a folder", "a file"])
def test_write_folder__a_name_that_was_taken_meanwhile_stays_as_it_is(tmp_path, taken_by):
    folder = tmp_path / "new"

    def contents() -> Iterator[tuple[str, bytes]]:
        taken_by(folder)
        if folder.is_dir():
            (folder / "theirs").touch()
        yield "mine", b""

    write = functools.partial(tg.write_folder, folder, "id", contents(), fabric())
    refused(tg.RunError, write, str(folder))
    assert names(tmp_path) == ["new"] and (folder.is_file() or names(folder) == ["theirs"])


def test_save__two_runs_that_end_together_lose_nothing(tmp_path, monkeypatch):
    """Both have all of it on the disk before either has the name."""
    barrier = multiprocessing.get_context("fork").Barrier(2)
    rename = Path.rename

    def together(path: Path, target: Path) -> Path:
        if target.name == "weights":
            barrier.wait(60)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", together)

    def train(seed: int) -> Run:
        return run(tmp_path / f"run{seed}", *SHORT, f"--seed={seed}", f"--save={tmp_path / 'weights'}")

    with ThreadPoolExecutor(2) as threads:
        first_run, second_run = threads.map(train, (1, 2))
    winner, loser = sorted((first_run, second_run), key=operator.attrgetter("status"))
    assert (winner.status, loser.status) == (0, 1), winner.err + loser.err
    assert f"they are in {loser.folder / 'save'}" in loser.out and "result" in [event["type"] for event in loser.events]
    assert names(tmp_path) == ["run1", "run2", "weights"]
    for folder, done in ((tmp_path / "weights", winner), (loser.folder / "save", loser)):
        assert is_sound(folder)
        seed = json.loads((folder / tg.SETTINGS).read_text())["flags"]["seed"]
        assert done.folder.name == f"run{seed}"


def make_folder_with_content(path: Path) -> None:
    (path / "theirs").mkdir(parents=True)


TAKEN = {                                # how a name may be taken
    "a file": Path.touch, "a folder": Path.mkdir, "a folder with content": make_folder_with_content,
    "a link": functools.partial(Path.symlink_to, target="elsewhere"), "a pipe": os.mkfifo}


@pytest.mark.parametrize("case", TAKEN)
def test_check_start__a_name_that_is_taken_ends_before_training(tmp_path, case):
    TAKEN[case](tmp_path / "save")
    done = run(tmp_path / "run", *SHORT, f"--save={tmp_path / 'save'}")
    assert done.status == 2 and "a free name" in done.err and names(tmp_path) == ["save"]


@pytest.mark.parametrize("where", ["run", ".", "/proc/new", "x" * 300, "file/new"])
def test_check_start__a_save_that_cannot_be_written_there(tmp_path, where):
    """In the place of the run directory, above it, in no file system, too long, below a file."""
    (tmp_path / "file").touch()
    done = run(tmp_path / "run", *SHORT, f"--save={tmp_path / where}")
    assert done.status == 2 and done.err.startswith("ConfigError") and names(tmp_path) == ["file"]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 300 kB in this folder."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True)
    if made.returncode != 0:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_finish__a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk"):
        done = run(tmp_path / "run", *SHORT, f"--save={tmp_path / 'disk/save'}")
        assert names(tmp_path / "disk") == []
    assert done.status == 1 and done.events[-1]["type"] == "result", "not aborted"
    assert json.loads(done.out.splitlines()[-1])["type"] == "result"
    assert "No space left on device" in done.err and is_sound(tmp_path / "run/save")
    wanted, found = tmp_path / "disk/save", tmp_path / "run/save"
    assert f"the weights could not be saved in {wanted}: they are in {found}" in done.lines


def test_finish__room_nowhere_takes_no_result_along(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        done = run(tmp_path / "run", *SHORT, f"--save={tmp_path / 'save'}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.status == 1 and done.events[-1]["type"] == "result"
    assert f"the weights could not be saved in {tmp_path / 'save'}: they are lost" in done.lines
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["log.jsonl", "log.txt", "settings.json", "train_gpt.py"]


@pytest.mark.parametrize("where", ["checkpoints/step-0000002", "save"])
def test_write_folder__a_run_that_is_ended_while_it_writes_leaves_nothing(tmp_path, monkeypatch, where):
    """By a signal, with files on the disk."""
    sync = tg.sync_to_disk

    def ended(path: Path) -> None:
        if path.name == tg.MANIFEST and path.parent.name.startswith(Path(where).name):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(100)
        sync(path)

    monkeypatch.setattr(tg, "sync_to_disk", ended)
    done = run(tmp_path, "--max_steps=3", "--checkpoint_every=2", "--sample_tokens=0", f"--save={tmp_path / 'save'}")
    assert done.status == 128 + signal.SIGTERM and "ended from outside" in done.err
    assert not list(tmp_path.rglob("*.part")) and not (tmp_path / where).exists()


def test_write_checkpoint__one_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    sync = tg.sync_to_disk

    def full(path: Path) -> None:
        if path.parent.name.startswith("step-0000004"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(path)

    monkeypatch.setattr(tg, "sync_to_disk", full)
    done = run(tmp_path / "run", "--max_steps=8", "--checkpoint_every=2", "--sample_tokens=0")
    assert done.status == 0 and "the run goes on without this checkpoint" in done.out, done.err
    assert names(tmp_path / "run" / tg.CHECKPOINTS) == ["step-0000002", "step-0000006"]


def test_write_checkpoint__only_those_of_earlier_steps_are_removed(tmp_path):
    """A stranger's later ones do not push out what was just written."""
    cfg = preset()
    folder = tmp_path / tg.CHECKPOINTS
    for step in (2, 4, 100, 200):
        (folder / f"step-{step:07d}").mkdir(parents=True)
    tg.write_checkpoint(tmp_path, "id", {}, executor(cfg), tg.Schedule(cfg).at(6))
    assert names(folder) == ["step-0000004", "step-0000006", "step-0000100", "step-0000200"]


# ---- Whole runs ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["log.txt", "log.jsonl"])
def test_check_start__a_run_directory_with_a_log_is_another_runs(tmp_path, name):
    """Whatever the log holds, be it the start of a run that failed: nothing is overwritten."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text("theirs")
    done = run(folder, *SHORT)
    assert done.status == 1 and "the log of a run" in done.err and "another --run_dir" in done.err
    assert names(folder) == [name] and (folder / name).read_text() == "theirs"


def test_race__data_that_end_early_leave_what_was_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "check_enough_data", no_warm_up)
    done = run(tmp_path / "run", "--train_files=formula:512:511:1500:1", f"--save={tmp_path / 'save'}",
               "--sample_tokens=0")
    result = done.events[-1]
    assert done.status == 2 and done.err.startswith("DataEnded"), done.err
    assert result["type"] == "result" and 0 < result["steps"] < 12 and result["void"] == "the data ended early"
    assert losses(done.folder)[-1][:2] == ("val", result["steps"]) and is_sound(tmp_path / "save")


def test_check_resumed__what_differs_is_said_and_written(checkpoints, tmp_path):
    def edit(content: dict) -> dict:
        return content | dict(facts=content["facts"] | dict(source_sha256="0" * 64, seed="7", adam_lr="0.5"))
    change(checkpoints / "step-0000004/run.pt", edit)
    done = run(tmp_path / "again", f"--resume={checkpoints.parent}", "--max_steps=6", "--sample_tokens=0")
    assert done.status == 0, done.err
    resumed, = done.of("resumed")
    assert sorted(resumed["differs"]) == ["adam_lr", "seed", "source_sha256"]
    assert resumed["differs"]["seed"] == ["7", "0"]
    assert "resumed with another adam_lr: 0.5 then, 0.008 now" in done.lines
    assert "resumed with another seed: 7 then, 0 now" in done.out

    same = run(tmp_path / "same", f"--resume={tmp_path / 'again'}", "--max_steps=6")
    assert same.status == 2 and "no whole" not in same.out


def test_check_resumed__other_data_or_an_end_that_is_passed(checkpoints, tmp_path):
    other = run(tmp_path / "other", f"--resume={checkpoints.parent}", "--train_files=formula:512:511:50000:2")
    assert other.status == 2 and "data to resume" in other.err
    short = run(tmp_path / "short", f"--resume={checkpoints.parent}", "--max_steps=3")
    assert short.status == 2 and "--max_steps" in short.err and "4 or more" in short.err
    assert not (tmp_path / "other").exists() and not (tmp_path / "short").exists()

"""Saves and checkpoints: what damaged files do to a reader, what an interrupted writer leaves behind, and resumed runs.

One intact run has tables in both locations; each case changes one thing in a copy of it. `rewrite_manifest` makes the
hashes match the change, so that the reader has to check the contents.
"""
import base64
import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from common import (Run, SimulatedTime, before_flush, expect_error, full_disk, losses, make_comm, make_engine,
                    no_large_files, noop, preset, recorded_writes, run, unequal, weights)

import train_gpt as tg

TABLES = f"trigram_embed 3 500; more_bigram_embed 2 300 {tg.ATTENTION_LAYERS[-3]} 1 host"
SHORT = ("--max_steps=1", "--val_every=0", "--sample_tokens=0")
# Writing a directory without rows needs only these attributes of an engine.
NO_TABLES = SimpleNamespace(comm=make_comm(), tables={})
# `small_pieces` limits a chunk to 64 rows, which have fewer bytes than this. Each table then has several files.
MAX_CHUNK_BYTES = 1 << 14

pytestmark = pytest.mark.usefixtures("small_pieces")

@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train 5 steps with checkpoints at steps 2 and 4 and a save; return the directory of both."""
    root = tmp_path_factory.mktemp("intact")
    done = run(root / "run", f"--tables={TABLES}", "--max_steps=5", "--checkpoint_every=2", "--sample_tokens=0",
               f"--save={root / 'save'}")
    assert done.status == 0, done.err
    return root

@pytest.fixture
def save(intact: Path, tmp_path: Path) -> Path:
    """Copy the save; return its directory."""
    return Path(shutil.copytree(intact / "save", tmp_path / "save"))

@pytest.fixture
def last_checkpoint(intact: Path, tmp_path: Path) -> Path:
    """Copy the run directory; return its last checkpoint."""
    shutil.copytree(intact / "run", tmp_path / "run")
    return tmp_path / "run" / tg.CHECKPOINT_DIR / "step-0000004"

def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())

def rewrite_manifest(directory: Path) -> None:
    """Write a manifest with the hashes that the files have now."""
    files = {path.name: dict(sha256=hashlib.sha256(path.read_bytes()).hexdigest())
             for path in directory.iterdir() if path.name != tg.MANIFEST_FILE and path.is_file()}
    (directory / tg.MANIFEST_FILE).write_text(json.dumps(dict(format=2, files=files)))

def rewrite_tensors(path: Path, edit: Callable[[dict], object]) -> None:
    """Replace the content of a file of tensors by `edit(content)`, and make the manifest match."""
    content = edit(torch.load(path, weights_only=True))
    # Delete the file instead of overwriting it, because its tensors may still be mapped.
    path.unlink()
    torch.save(content, path)
    rewrite_manifest(path.parent)

def sample(directory: Path) -> None:
    tg.sample_from_save(tg.load_config([f"--sample={directory}", "--sample_tokens=2"]))

def load_step(last_checkpoint: Path, **changes: object) -> int:
    """Load the last intact checkpoint; return its step."""
    cfg = preset(**dict(tables=tg.parse_value("tables", TABLES)) | changes)
    return tg.load_checkpoint(last_checkpoint.parent.parent, make_engine(cfg))["log"]["steps_done"]

def first_match(directory: Path, pattern: str) -> Path:
    return min(directory.glob(pattern))


# ---- Damage ----------------------------------------------------------------------------------------------------------
def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)

def replace_with(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)
    return damage

def swap_with_sibling(path: Path) -> None:
    """Swap the file with another .pt file of its directory."""
    other = next(other for other in sorted(path.parent.glob("*.pt")) if other != path)
    content = other.read_bytes()
    path.rename(other)
    path.write_bytes(content)

DAMAGE = dict(bit_flip=flip_bit, truncated=truncate, missing=Path.unlink, fifo=replace_with(os.mkfifo),
              directory=replace_with(Path.mkdir), swapped=swap_with_sibling)

ROWS_FILE = "rows-trigram*-1.pt"
# A manifest with a flipped bit or of another directory has other hashes. The cases above cover wrong hashes.
CASES = [(damage, *files) for damage in DAMAGE for files in (("weights.pt", "run.pt"), (ROWS_FILE, ROWS_FILE))]
CASES += [(damage, tg.MANIFEST_FILE, tg.MANIFEST_FILE) for damage in DAMAGE if damage not in ("bit_flip", "swapped")]

@pytest.mark.parametrize("damage, save_file, run_file", CASES)
def test_read_tensors__damage(save, last_checkpoint, capsys, damage, save_file, run_file) -> None:
    """A damaged save is refused by file name; a damaged checkpoint is skipped with a warning."""
    path = first_match(save, save_file)
    DAMAGE[damage](path)
    # Without a manifest no file has a hash, so the first file that is read is refused.
    no_manifest = save_file == tg.MANIFEST_FILE and damage == "missing"
    with expect_error(tg.DataError, "weights.pt" if no_manifest else path.name):
        sample(save)
    path = first_match(last_checkpoint, run_file)
    DAMAGE[damage](path)
    assert load_step(last_checkpoint) == 2, "the checkpoint before the damaged one"
    out = capsys.readouterr().out
    assert str(last_checkpoint) in out and "warning: skipping checkpoint step-0000004" in out
    assert no_manifest or str(path) in out, "the warning names the damaged file"

def fill_with_zeros(path: Path) -> None:
    """Replace the file by a sparse file, larger than a small file may be. It takes no disk space."""
    path.write_bytes(b"")
    os.truncate(path, tg.MAX_SMALL_FILE_BYTES + 1)

@pytest.mark.parametrize("damage, found", [
    (DAMAGE["fifo"], "no regular file"), (DAMAGE["directory"], "no regular file"),
    (fill_with_zeros, "67,108,865 bytes")])
@pytest.mark.parametrize("name", [tg.SETTINGS_FILE, tg.MANIFEST_FILE, tg.VOCAB_FILE])
def test_read_small_file__kind_and_size_are_checked_before_reading(save, name, damage, found) -> None:
    """A named pipe would block, and a large file would fill the memory."""
    path = save / name
    path.touch()
    damage(path)
    with expect_error(tg.DataError, str(path), found, "a regular file of at most 67,108,864 bytes"):
        sample(save)

def test_sample_from_save__prints_no_control_characters_of_a_vocabulary(save, capsys) -> None:
    token_bytes = base64.b64encode(b"\x1b[31m\tred\r")
    lines = [b"%s %d" % (token_bytes, token) for token in range(511)]
    (save / tg.VOCAB_FILE).write_bytes(b"\n".join(lines))
    rewrite_manifest(save)
    sample(save)
    out = capsys.readouterr().out
    assert "\\x1b[31m\tred\\x0d" in out and "\x1b" not in out and "\r" not in out

def record_prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Replace `generate`. Returns a list to which each call appends the tokens of its prompt."""
    prompts: list[list[int]] = []

    def generate(*args: Any) -> str:
        prompts.append(args[-1])
        return ""

    monkeypatch.setattr(tg, "generate", generate)
    return prompts

def test_sample_from_save__the_text_of_a_special_token_is_text(tmp_path, monkeypatch) -> None:
    """tiktoken's `encode` refuses <|endoftext|>, or gives it the id of BOS."""
    cfg = preset("tiny", tg.GPT2_VOCAB, tg.GPT2_BOS_ID)
    tg.save_weights(tmp_path / "save", "id", cfg, make_engine(cfg), tg.Schedule(cfg).at(0), None)
    encoding = Mock(**{"encode.return_value": [tg.GPT2_BOS_ID], "encode_ordinary": str.encode})
    monkeypatch.setitem(sys.modules, "tiktoken", Mock(**{"get_encoding.return_value": encoding}))
    prompts = record_prompts(monkeypatch)
    tg.sample_from_save(tg.load_config([f"--sample={tmp_path / 'save'}", "--prompt=a <|endoftext|>"]))
    assert [*map(bytes, prompts)] == [b"a <|endoftext|>"]

def test_sample_from_save__a_prompt_is_encoded_as_its_bytes(save, monkeypatch) -> None:
    """In an ASCII locale, Python turns each byte of an argument that is not ASCII into a surrogate."""
    lines = [b"%s %d" % (base64.b64encode(bytes([i % 256]) + b"\0" * (i // 256)), i) for i in range(511)]
    (save / tg.VOCAB_FILE).write_bytes(b"\n".join(lines))
    rewrite_manifest(save)
    prompts = record_prompts(monkeypatch)
    monkeypatch.setattr(tg, "print_stdout", noop)
    for prompt in ("naïve", "naïve".encode().decode("ascii", "surrogateescape")):
        tg.sample_from_save(tg.load_config([f"--sample={save}", prompt]))
    assert prompts == 2 * [[*"naïve".encode()]]

def test_load_checkpoint__no_intact_checkpoint(last_checkpoint) -> None:
    for path in last_checkpoint.parent.iterdir():
        truncate(path / "run.pt")
    with expect_error(tg.DataError, "step-0000002", "an intact checkpoint"):
        load_step(last_checkpoint)

def test_load_checkpoint__ranks_see_different_checkpoints(last_checkpoint, monkeypatch) -> None:
    def gather_from_two_ranks(self: tg.Communicator, fact: object) -> list:
        return [fact, dict(checkpoints="none")] if isinstance(fact, dict) else [fact, fact]
    ranks = make_engine(preset(), world_size=2)
    monkeypatch.setattr(tg.Communicator, "all_gather", gather_from_two_ranks)
    with expect_error(tg.ConfigError, "none on rank 1"):
        tg.load_checkpoint(last_checkpoint.parent.parent, ranks)

class CallsMkdir:
    """An object whose pickle calls os.mkdir when it is loaded."""
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("evil_was_here",)

@pytest.mark.parametrize("content", [b"junk" * 1000, pickle.dumps(CallsMkdir()), None], ids=["junk", "bare", "zip"])
def test_read_tensors__runs_no_code(save, content, monkeypatch) -> None:
    """Pickled code is refused although the hash is right, and the message does not suggest weights_only=False."""
    path = save / "weights.pt"
    torch.save(dict(attn=CallsMkdir()), path)
    path.write_bytes(content or path.read_bytes())
    rewrite_manifest(save)
    monkeypatch.chdir(save)
    with expect_error(tg.DataError, "weights.pt", "unreadable or with pickled code") as caught:
        sample(save)
    assert "weights_only" not in str(caught.value) and not Path("evil_was_here").exists()


# ---- Wrong content with right hashes ---------------------------------------------------------------------------------
def edit_entry(name: str, change: Callable[[Any], object] | None = None) -> Callable[[dict], dict]:
    """Return an edit that replaces an entry x by change(x), or removes it if there is no change."""
    def edit(tensors: dict) -> dict:
        others = {label: x for label, x in tensors.items() if label != name}
        return others if change is None else others | {name: change(tensors.get(name))}
    return edit

def drop_last_row(x: torch.Tensor) -> torch.Tensor:
    return x[:-1].clone()

def drop_first_column(x: torch.Tensor) -> torch.Tensor:
    return x[:, 1:].clone()

def id_out_of_range(ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids == ids.max(), 500, ids)

WRONG_CONTENT = {                        # (part, case) -> (edit, words in the message)
    ("weights", "shape"): (edit_entry("attn", drop_last_row), "attn"),
    ("weights", "dtype"): (edit_entry("attn", torch.Tensor.double), "attn"),
    ("weights", "a table of fewer rows"): (edit_entry("bigram_embed", drop_last_row), "bigram_embed"),
    ("weights", "unknown"): (edit_entry("new", lambda _: torch.zeros(1)), "new"),
    ("weights", "missing"): (edit_entry("mlp"), "mlp"),
    ("weights", "nothing"): (noop, "Error"),
    ("moments", "missing"): (edit_entry("embed.v"), "embed.v"),
    ("moments", "shape"): (edit_entry("attn.momentum", drop_last_row), "attn.mom"),
    ("moments", "dtype"): (edit_entry("scalars.m", torch.Tensor.double), "scalars.m"),
    ("rows", "id out of range"): (edit_entry("ids", id_out_of_range), ""),
    ("rows", "no ids"): (edit_entry("ids"), ""),
    ("rows", "fewer columns"): (edit_entry("rows", drop_first_column), ""),
    ("rows", "fewer rows"): (edit_entry("rows", drop_last_row), ""),
    ("state of rows", "no last"): (edit_entry("last"), ""),
    ("state of rows", "fewer v"): (edit_entry("v", drop_last_row), ""),
    ("state of rows", "i64 last"): (edit_entry("last", torch.Tensor.long), "")}

@pytest.mark.parametrize("part, case", WRONG_CONTENT)
def test_check_tensors__wrong_content(save, last_checkpoint, capsys, part, case) -> None:
    """A save with wrong content is refused. For such a checkpoint, the one before it is loaded, with a warning."""
    edit, named = WRONG_CONTENT[part, case]
    if part != "moments":                                     # a save has no moments
        path = first_match(save, "weights.pt" if part == "weights" else "rows-trigram*-1.pt")
        rewrite_tensors(path, edit)
        with expect_error(tg.DataError, str(save), named):
            sample(save)
    if part in ("weights", "moments"):
        rewrite_tensors(last_checkpoint / "run.pt", edit_entry("state", edit))
    else:
        rewrite_tensors(first_match(last_checkpoint, "rows-trigram*-1.pt"), edit)
    assert load_step(last_checkpoint) == 2
    out = capsys.readouterr().out
    assert str(last_checkpoint) in out and named in out

def edit_log(name: str, change: Callable[[Any], object] | None = None) -> Callable[[dict], dict]:
    return edit_entry("log", edit_entry(name, change))

def one_text(_: object) -> list[str]:
    return ["x"]

OTHER_ENTRIES = {                        # case -> edit of run.pt
    "no fingerprint": edit_entry("fingerprint"), "fingerprint: a list": edit_entry("fingerprint", list),
    "no data_sha256": edit_entry("fingerprint", edit_entry("data_sha256")),
    "no log": edit_entry("log"), "log: a list": edit_entry("log", list), "no last_val": edit_log("last_val"),
    "no steps_done": edit_log("steps_done"), "steps_done: a text": edit_log("steps_done", str),
    "steps_done: another step": edit_log("steps_done", (3).__mul__), "tokens: a list": edit_log("tokens", one_text),
    "lines: a list": edit_log("lines", list), "no train_time_ms": edit_entry("train_time_ms"),
    "train_time_ms: None": edit_entry("train_time_ms", noop), "no cycle_progress": edit_entry("cycle_progress"),
    "cycle_progress: a number": edit_entry("cycle_progress", len),
    "cycle_progress: a text": edit_entry("cycle_progress", one_text),
    "no state": edit_entry("state"), "a list": list}

@pytest.mark.parametrize("case", OTHER_ENTRIES)
def test_load_checkpoint__other_entries_or_types(last_checkpoint, capsys, case) -> None:
    """A checkpoint of another trainer has intact files with other content. The one before it is loaded, with a warning.
    """
    rewrite_tensors(last_checkpoint / "run.pt", OTHER_ENTRIES[case])
    assert load_step(last_checkpoint) == 2
    out = capsys.readouterr().out
    assert str(last_checkpoint / "run.pt") in out and "warning: skipping checkpoint step-0000004" in out
    assert "trainer" in out

@pytest.mark.parametrize("changes", [dict(dtype="float64"), dict(bigram_rows=2000), dict(time_budget=9.0),
                                     dict(tables=tg.parse_value("tables", TABLES.replace("500", "400")))], ids=str)
def test_load_checkpoint__of_another_model(last_checkpoint, changes) -> None:
    with expect_error(tg.DataError, "an intact checkpoint"):
        load_step(last_checkpoint, **changes)

def test_sample_from_save__damaged_settings(save) -> None:
    path = save / tg.SETTINGS_FILE
    path.write_text(path.read_text().replace('"seed": "0"', '"seed": "1"'))
    with expect_error(tg.DataError, tg.SETTINGS_FILE, "as in manifest.json"):
        sample(save)


# ---- Writing ---------------------------------------------------------------------------------------------------------
def test_write_directory__the_manifest_names_every_file(intact) -> None:
    for directory in (intact / "save", intact / "run" / tg.CHECKPOINT_DIR / "step-0000004"):
        manifest = json.loads((directory / tg.MANIFEST_FILE).read_text())
        assert manifest["format"] == 2 and sorted([*manifest["files"], tg.MANIFEST_FILE]) == names(directory)
        for name, entry in manifest["files"].items():
            content = (directory / name).read_bytes()
            assert entry == dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            assert len(content) < MAX_CHUNK_BYTES + 10_000 or not name.startswith("rows")
        for label in ("trigram_embed", "more_bigram_embed"):
            assert (directory / f"rows-{label}-0of1-1.pt").exists()
    assert names(intact / "run" / tg.CHECKPOINT_DIR) == ["step-0000002", "step-0000004"]

def test_write_directory__flushes_everything_before_the_rename(tmp_path, monkeypatch) -> None:
    calls = recorded_writes(monkeypatch)
    tg.write_directory(tmp_path / "new", "id", {"a.bin": b"x", "b.pt": dict(x=torch.ones(3))}, NO_TABLES)
    inodes = [(tmp_path / "new" / name).stat().st_ino for name in ("a.bin", "b.pt", tg.MANIFEST_FILE, "")]
    assert calls == [*inodes, "new", tmp_path.stat().st_ino]

@pytest.mark.parametrize("failing_flush", range(5))
def test_write_directory__a_failed_flush_leaves_no_files(tmp_path, monkeypatch, failing_flush) -> None:
    """The failing flush is any of those before the rename: of a file, of the manifest, of the directory."""
    flushes_left = iter(range(failing_flush, -2, -1))

    def failing(handle: int) -> None:
        if next(flushes_left) == 0:
            full_disk()

    monkeypatch.setattr(os, "fsync", failing)
    contents = {f"{i}.pt": dict(x=torch.ones(3)) for i in range(3)}
    with expect_error(tg.RunError, "No space left on device"):
        tg.write_directory(tmp_path / "new", "id", contents, NO_TABLES)
    assert names(tmp_path) == []

@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_write_directory__a_file_system_that_cannot_flush_directories(tmp_path, monkeypatch, code) -> None:
    """A save and checkpoints are written nevertheless. A file that cannot be flushed is an error, for every code."""
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

def create_directory(directory: Path) -> None:
    (directory / "theirs").mkdir(parents=True)

@pytest.mark.parametrize("take", [Path.touch, create_directory])
def test_write_directory__a_path_that_appears_meanwhile_is_not_changed(tmp_path, monkeypatch, take) -> None:
    directory = tmp_path / "new"

    def take_name(path: Path) -> None:
        if path.name == "mine":
            take(directory)

    before_flush(monkeypatch, take_name)
    with expect_error(tg.RunError, str(directory)):
        tg.write_directory(directory, "id", dict(mine=b""), NO_TABLES)
    assert names(tmp_path) == ["new"] and (directory.is_file() or names(directory) == ["theirs"])

@pytest.mark.parametrize("where, found", [
    ("run", "the path already exists"), ("file", "the path already exists"), (".", "the path already exists"),
    ("/proc/new", "No such file"), ("x" * 300, "File name too long"), ("file/new", "Not a directory")])
def test_preflight__a_save_that_cannot_be_written_ends_before_training(tmp_path, where, found) -> None:
    for make, name in ((Path.touch, "file"), (Path.mkdir, "run")):
        make(tmp_path / name)
    done = run(tmp_path / "run", *SHORT, f"--save={tmp_path / where}")
    assert done.status == 2 and done.err.startswith("ConfigError") and found in done.err
    assert names(tmp_path) == ["file", "run"] and names(tmp_path / "run") == []

def test_finish_run__a_full_disk(tmp_path, monkeypatch) -> None:
    before_flush(monkeypatch, full_disk, "elsewhere")
    directory = tmp_path / "elsewhere"
    done = run(tmp_path / "run", *SHORT, f"--save={directory}")
    assert done.status == 1 and done.events[-1]["type"] == "result", "not aborted"
    assert json.loads(done.out.splitlines()[-1])["type"] == "result" and "No space left on device" in done.err
    assert f"weights saved in {tmp_path / 'run/save'}" in done.lines
    assert names(tmp_path) == ["run"]
    sample(tmp_path / "run/save")

def test_finish_run__no_space_anywhere_still_reports_the_result(tmp_path) -> None:
    # The copy of the source (about 320 kB) fits; the weights (1.3 MB) do not.
    with no_large_files(1_000_000):
        done = run(tmp_path / "run", *SHORT, f"--save={tmp_path / 'save'}")
    assert done.status == 1 and done.events[-1]["type"] == "result"
    assert "weights not saved" in done.lines
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["log.jsonl", "log.txt", "settings.json", "train_gpt.py"]

@pytest.mark.parametrize("where", ["checkpoints/step-0000002", "save"])
@pytest.mark.parametrize("number, cause", [(signal.SIGTERM, "terminated by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_end__a_signal_during_a_write_leaves_no_directory(tmp_path, monkeypatch, where, number, cause) -> None:
    def raise_signal(path: Path) -> None:
        if path.name == tg.MANIFEST_FILE:
            signal.raise_signal(number)
            time.sleep(100)

    before_flush(monkeypatch, raise_signal, Path(where).name)
    done = run(tmp_path, "--max_steps=3", "--checkpoint_every=2", "--sample_tokens=0", f"--save={tmp_path / 'save'}")
    assert done.status == 128 + number and cause in done.err and cause in done.of("aborted")[0]["cause"]
    assert not list(tmp_path.rglob("*.part")) and not (tmp_path / where).exists()

def test_write_checkpoint__one_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch) -> None:
    before_flush(monkeypatch, full_disk, "step-0000004")
    done = run(tmp_path / "run", "--max_steps=8", "--checkpoint_every=2", "--sample_tokens=0")
    assert done.status == 0 and "warning: continuing without this checkpoint" in done.out, done.err
    assert names(tmp_path / "run" / tg.CHECKPOINT_DIR) == ["step-0000002", "step-0000006"]

def test_write_checkpoint__only_those_of_earlier_steps_are_removed(tmp_path) -> None:
    """Later checkpoints of another run in the same directory do not replace the one that was just written."""
    cfg = preset()
    directory = tmp_path / tg.CHECKPOINT_DIR
    for step in (2, 4, 100, 200):
        (directory / f"step-{step:07d}").mkdir(parents=True)
    tg.write_checkpoint(tmp_path, "id", {}, make_engine(cfg), tg.Schedule(cfg).at(6))
    assert names(directory) == ["step-0000004", "step-0000006", "step-0000100", "step-0000200"]

def test_write_checkpoint__off_the_clock(tmp_path, monkeypatch) -> None:
    """On a simulated clock, a checkpoint takes 700 s; training time does not include them."""
    clock = SimulatedTime(monkeypatch, tick=1e-6)
    write = tg.write_checkpoint

    def write_slowly(*args: Any) -> None:
        clock.work(700)
        write(*args)

    monkeypatch.setattr(tg, "write_checkpoint", write_slowly)
    done = run(tmp_path / "run", "--checkpoint_every=10", "--sample_tokens=0")
    phase, = [e for e in done.of("phase") if e["name"] == "checkpoint"]
    assert 700_000 < phase["ms"] < 701_000 and not phase["timed"]
    assert done.of("step")[-1]["step"] == 12 and 0 < done.of("result")[0]["train_time_ms"] < 1000


# ---- Resumed runs (with another number of ranks: test_table_files.py) ------------------------------------------------
def test_load_checkpoint__a_resumed_run_equals_an_uninterrupted_one(tmp_path) -> None:
    """Losses and weights are equal bit for bit, and the log has the lines and the times up to the checkpoint.

    The resumed run can be interrupted and resumed again.
    """
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    run(whole, "--seed=6", f"--save={tmp_path / 'whole_save'}", "--sample_tokens=0")
    run(interrupted, "--seed=6", "--max_steps=9", "--checkpoint_every=2", "--sample_tokens=0")
    assert names(interrupted / tg.CHECKPOINT_DIR) == ["step-0000006", "step-0000008"]
    done = run(tmp_path / "a", f"--resume={interrupted}", "--max_steps=0", f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    assert losses(done.folder) == losses(whole) and weights(tmp_path / "save") == weights(tmp_path / "whole_save")
    before = Run(interrupted, 0, "", "")
    assert done.events[0] == before.events[0]
    times = [e["train_time_ms"] for e in done.of("step")]
    assert times[:8] == [e["train_time_ms"] for e in before.of("step")][:8] and times == sorted(times)
    assert [(e["step"], e["source"], e["seed"]) for e in done.of("resumed")] == [(8, str(interrupted), 6)]

    run(tmp_path / "b", f"--resume={interrupted}", "--max_steps=11", "--checkpoint_every=3")
    again = run(tmp_path / "c", f"--resume={tmp_path / 'b'}", "--max_steps=0")
    assert losses(again.folder) == losses(whole) and [e["step"] for e in again.of("resumed")] == [8, 10]
    assert again.of("resumed")[1]["changed"]["checkpoint_every"] == "3", "flags are those of the run before"

def test_load_checkpoint__a_resumed_run_in_bf16_has_its_mantissas(tmp_path) -> None:
    """The mantissas are equal bit for bit: the lower 16 bits of a NorMuon bank in bf16 affect the next updates only."""
    flags = "--dtype=bfloat16", "--sample_tokens=0", "--checkpoint_every=2"
    run(tmp_path / "whole", *flags, f"--save={tmp_path / 'whole_save'}")
    run(tmp_path / "interrupted", *flags, "--max_steps=7")
    done = run(tmp_path / "again", f"--resume={tmp_path / 'interrupted'}", "--max_steps=0",
               f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    assert [e["step"] for e in done.of("resumed")] == [6]
    assert losses(done.folder) == losses(tmp_path / "whole")
    assert weights(tmp_path / "save") == weights(tmp_path / "whole_save")
    whole, again = (torch.load(directory / tg.CHECKPOINT_DIR / "step-0000010/run.pt")["state"]
                    for directory in (tmp_path / "whole", done.folder))
    assert unequal(again, whole) == [] and whole["mlp.mantissa"].count_nonzero() > 1000

def test_check_resume__differences_are_printed_and_logged(last_checkpoint, tmp_path) -> None:
    def edit(facts: dict) -> dict:
        return facts | dict(source_sha256="0" * 64, seed="7", adam_lr="0.5")
    rewrite_tensors(last_checkpoint / "run.pt", edit_entry("fingerprint", edit))
    source = last_checkpoint.parent.parent
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

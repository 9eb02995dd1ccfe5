"""Files from hostile hands: what a save or a checkpoint may do to a run, and what a run leaves behind.

The cases change one thing of a sound save or checkpoint; most ask the function that reads it.
"""
from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from common import Run, executor, fabric, preset, recorded_writes, refused, run

import train_gpt as tg

SAVE_FLAGS = ("--max_steps=1", "--val_every=0", "--sample_tokens=0")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A run of 5 steps with a save, and checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("sound")
    flags = ("--max_steps=5", "--checkpoint_every=2", "--sample_tokens=0")
    done = run(folder / "run", *flags, f"--save={folder / 'save'}")
    assert done.status == 0, done.err
    return folder


@pytest.fixture
def save(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound / "save", tmp_path / "save"))


@pytest.fixture
def checkpoints(sound, tmp_path) -> Path:
    """A run directory with both checkpoints, to be changed."""
    shutil.copytree(sound / "run", tmp_path / "run")
    return tmp_path / "run" / tg.CHECKPOINTS


def name_of(case) -> str:
    """A short name of a case for pytest."""
    if isinstance(case, str):
        return case[:8]
    return getattr(case, "__name__", type(case).__name__)


def refuse_save(folder: Path, *parts: str) -> str:
    """The message with which a save is refused, which holds these parts."""
    def load() -> None:
        tg.load_weights(folder, "cpu")
    return refused(tg.DataError, load, *parts)


def refuse_checkpoints(folder: Path, cfg: tg.Config, *parts: str) -> str:
    def load() -> None:
        tg.load_checkpoint(folder, cfg, fabric())
    return refused(tg.DataError, load, *parts)


# ---- kinds of files --------------------------------------------------------------------------------------------------

class Evil:
    """What a pickle may hold: a call that is made when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("evil_was_here",)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_empty(path: Path) -> None:
    path.touch()


def make_junk(path: Path) -> None:
    path.write_bytes(b"junk" * 1000)


def make_evil(path: Path) -> None:
    torch.save(dict(attn=Evil()), path)


def make_evil_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Evil()))


NO_FILES = {                             # how to make one -> what the message calls it
    make_fifo: "pipe", make_folder: "directory", make_broken_link: "nowhere", make_loop: "link"}
NO_TENSORS = (make_empty, make_junk, make_evil, make_evil_pickle)


def check_no_advice(message: str, folder: Path) -> None:
    """A refused pickle is named for what it is, has run nothing, and nobody is told to let it."""
    assert "would run code when loaded, or is damaged" in message
    assert "weights_only" not in message and "arbitrary" not in message
    assert not (folder / "evil_was_here").exists() and not Path("evil_was_here").exists()


# ---- saves -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", NO_FILES, ids=name_of)
@pytest.mark.parametrize("name", ["config.json", "weights.pt", "manifest.json"])
@pytest.mark.parametrize("older", [False, True], ids=["", "older"])
def test_what_is_no_file_is_named_and_never_opened(save, make, name, older):
    if older:
        (save / "manifest.json").unlink()
    (save / name).unlink(missing_ok=True)
    make(save / name)
    refuse_save(save, str(save / name), NO_FILES[make])


@pytest.mark.parametrize("make", NO_TENSORS, ids=name_of)
def test_a_pickle_that_is_refused_says_what_that_means(save, make, monkeypatch):
    (save / "manifest.json").unlink()
    (save / "weights.pt").unlink()
    make(save / "weights.pt")
    monkeypatch.chdir(save)
    check_no_advice(refuse_save(save, "weights.pt"), save)


@pytest.mark.parametrize("name", ["config.json", "weights.pt"])
def test_a_flipped_bit_is_named(save, name):
    content = bytearray((save / name).read_bytes())
    content[len(content) // 2] ^= 1
    (save / name).write_bytes(content)
    refuse_save(save, str(save / name), "another content")


def test_a_file_of_another_size_is_not_even_read(save, monkeypatch):
    os.truncate(save / "weights.pt", 2**36)
    monkeypatch.delattr(tg, "file_sha256")
    refuse_save(save, str(save / "weights.pt"), "another content")


def test_a_file_of_another_save_is_no_part_of_this_one(save):
    (save / "vocab.txt").write_text("QQ== 0\n")
    refuse_save(save, "vocab.txt", "does not name", "mixed")


def test_a_file_that_the_manifest_names_must_be_there(save):
    (save / "weights.pt").unlink()
    refuse_save(save, "weights.pt", "No such file")


def test_an_older_save_is_sampled_with_a_remark(save, tmp_path):
    before = run(tmp_path, f"--sample={save}", "--sample_tokens=3")
    (save / "manifest.json").unlink()
    after = run(tmp_path, f"--sample={save}", "--sample_tokens=3")
    assert before.status == 0 and after.status == 0, after.err
    assert "manifest" not in before.out and "no manifest.json" in after.out
    assert after.out.endswith(before.out), "the same text"


CONFIGS = dict(                          # what a config.json may say instead
    dtype=3, attn_scale="wide", stages="none", num_heads=2.0, vocab_size=10**9, head_dim=None,
    seed=[[[]]], model_dim=-1, document_start=600, no_such_field=1, val_tokens="1e6",
    num_slots=True, row_comms="pigeon")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_in_a_file_is_checked_like_flags(save, name):
    (save / "manifest.json").unlink()
    path = save / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: CONFIGS[name]}))
    with pytest.raises((tg.DataError, tg.ConfigError)) as caught:
        tg.load_weights(save, "cpu")
    assert name in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "7", "{}", "null", '{"dtype"', "\xff", " " * 2_000_000],
                         ids=name_of)
def test_a_configuration_that_is_none_is_refused_in_words(save, text):
    (save / "manifest.json").unlink()
    (save / "config.json").write_text(text, "latin-1")
    refuse_save(save, "config.json")


def test_a_sample_needs_no_optimizer(save, tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "Optimizer", None)
    monkeypatch.setattr(tg, "Executor", None)
    done = run(tmp_path, f"--sample={save}", "--sample_tokens=3")
    assert done.status == 0 and done.out.startswith("token ids"), done.err


TENSORS = dict(                          # what weights.pt may hold instead -> what the message names
    shape="attn is (1, 128, 32) float32 instead of (10, 128, 32) float32",
    broadcast="scalars is (1,) float32", dtype="attn is (10, 128, 32) float64 instead",
    infinite="lm_head is not finite", sparse="embed is no plain tensor", meta="embed is no plain tensor",
    number="embed is no plain tensor", unknown="'new' unknown", unnamed="7 unknown", missing="mlp missing",
    nothing="NoneType instead of tensors", one="Tensor instead of tensors")


def other_weights(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """Case of the table above -> content of weights.pt."""
    attn, embed, head = tensors["attn"], tensors["embed"], tensors["lm_head"]
    without = dict(tensors)
    del without["mlp"]
    return dict(
        shape=tensors | dict(attn=attn[:1]), broadcast=tensors | dict(scalars=torch.zeros(1)),
        dtype=tensors | dict(attn=attn.double()), infinite=tensors | dict(lm_head=head / 0),
        sparse=tensors | dict(embed=embed.to_sparse()), meta=tensors | dict(embed=embed.to("meta")),
        number=tensors | dict(embed=3), unknown=tensors | dict(new=torch.zeros(1)),
        unnamed=tensors | {7: torch.zeros(1)}, missing=without, nothing=None, one=attn)


@pytest.mark.parametrize("case", TENSORS)
def test_weights_are_those_of_the_configuration(save, case):
    (save / "manifest.json").unlink()
    tensors = torch.load(save / "weights.pt")
    torch.save(other_weights(tensors)[case], save / "weights.pt")
    refuse_save(save, "weights.pt", TENSORS[case])


# ---- saving ----------------------------------------------------------------------------------------------------------

def test_finite_weights_that_give_no_finite_logits(save, tmp_path):
    tensors = torch.load(save / "weights.pt", weights_only=True)
    huge = {label: torch.full_like(x, 1e38) for label, x in tensors.items()}
    torch.save(huge, save / "weights.pt")
    (save / "manifest.json").unlink()
    done = run(tmp_path / "run", f"--sample={save}")
    assert done.status == 1 and "Traceback" not in done.err
    assert done.err.startswith("RunError: sample\n  found:    logits that are not finite")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_all_is_flushed_before_a_save_gets_its_first_name(tmp_path, monkeypatch):
    calls = recorded_writes(monkeypatch)
    tg.save_weights(tmp_path, preset(), {}, [b"a"])
    names = ["vocab.txt", "weights.pt", "config.json", "manifest.json"]
    assert calls == [*inodes(tmp_path, *names), *names, tmp_path.stat().st_ino]


def test_a_checkpoint_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = recorded_writes(monkeypatch)
    tg.save_checkpoint(tmp_path, 2, {})
    name = next(tmp_path.iterdir()).name
    assert calls == [*inodes(tmp_path, name), name, tmp_path.stat().st_ino]


def inodes(folder: Path, *names: str) -> list[int]:
    return [(folder / name).stat().st_ino for name in names]


def test_a_manifest_names_every_file_of_a_save(save):
    manifest = json.loads((save / "manifest.json").read_text())
    assert names(save) == ["config.json", "manifest.json", "weights.pt"]
    assert manifest["format"] == 1 and sorted(manifest["files"]) == ["config.json", "weights.pt"]
    for name, entry in manifest["files"].items():
        content = (save / name).read_bytes()
        assert entry == dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("name", ["vocab.txt", "weights.pt", "config.json", "manifest.json"])
def test_another_runs_save_is_refused_before_anything_is_trained(tmp_path, name):
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / name).write_text("theirs")
    done = run(tmp_path / "run", *SAVE_FLAGS, f"--save={tmp_path / 'save'}")
    assert done.status == 2 and f"{name}, of another run" in done.err and not done.folder.exists()
    assert names(tmp_path / "save") == [name] and (tmp_path / "save" / name).read_text() == "theirs"


def test_leftovers_of_a_killed_run_are_removed_and_a_live_writer_is_left_alone(tmp_path):
    mine, theirs, other = (tmp_path / name for name in ("config.json.part", "weights.pt.part", "shard.bin.part"))
    for path in (mine, theirs, other):
        path.write_text("half")
    with open(theirs) as file:
        assert tg.take_lock(file)
        tg.prepare_save(tmp_path)
        assert names(tmp_path) == ["shard.bin.part", "weights.pt.part"]
    tg.prepare_save(tmp_path)
    assert names(tmp_path) == ["shard.bin.part"], "what is not of a save is not ours"


class Full:
    """Opening a file for writing inside this folder gives one on a disk that is full."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, path, mode: str = "r", *args, **kwargs):
        if "x" in mode and Path(path).parent == self.folder and Path(path).name.startswith("weights"):
            return open("/dev/full", "w+b")
        return open(path, mode, *args, **kwargs)


def test_weights_that_do_not_fit_go_to_the_run_directory(tmp_path, monkeypatch):
    wanted = tmp_path / "full"
    monkeypatch.setattr(tg, "open", Full(wanted), raising=False)
    done = run(tmp_path / "run", *SAVE_FLAGS, f"--save={wanted}")
    fallback = tmp_path / "run" / "save"
    assert done.status == 1 and done.events[-1]["type"] == "result", "not aborted"
    assert json.loads(done.out.splitlines()[-1])["type"] == "result"
    assert "No space left on device" in done.out
    assert f"the weights could not be saved in {wanted}: they are in {fallback}" in done.lines
    assert names(wanted) == [] and names(fallback) == ["config.json", "manifest.json", "weights.pt"]
    assert tg.load_weights(fallback, "cpu")[0].num_heads == 2


def test_the_other_ranks_wait_longer_while_one_writes_a_save(tmp_path, monkeypatch):
    calls = mock.Mock()
    monkeypatch.setattr(tg.Fabric, "set_timeout", calls.set_timeout)
    monkeypatch.setattr(tg, "save_weights", calls.save_weights)
    cfg = preset(save=str(tmp_path), comm_timeout=7.0)
    log = mock.Mock(fabric=fabric(), run_dir=tmp_path)
    executor_without_tables = mock.Mock(rowwise_tables=dict)
    assert tg.save_or_fall_back(log, cfg, executor_without_tables, None)
    names = [call[0] for call in calls.mock_calls]
    assert names == ["set_timeout", "save_weights"]
    calls.set_timeout.assert_called_once_with(7.0 * tg.LONG_PATIENCE)


def test_weights_that_fit_nowhere_do_not_take_the_result_along(tmp_path, monkeypatch):
    def no_room(folder, *_):
        raise tg.RunError(f"writing {folder}", "No space left on device", "room", "free some")
    monkeypatch.setattr(tg, "save_weights", no_room)
    done = run(tmp_path / "run", *SAVE_FLAGS, f"--save={tmp_path / 'full'}")
    assert done.status == 1 and done.events[-1]["type"] == "result"
    assert f"the weights could not be saved in {tmp_path / 'full'}: they are lost" in done.lines


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["key", "disk"])
@pytest.mark.parametrize("at", range(3))
def test_a_save_that_is_stopped_leaves_nothing(tmp_path, monkeypatch, stop, at):
    """While the files are written, or between the names of the first and the last."""
    calls = []

    def rename(path: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) > at:
            raise stop
        return Path(os.rename(path, target) or target)

    monkeypatch.setattr(Path, "rename", rename)
    expected = tg.RunError if isinstance(stop, OSError) else stop
    with pytest.raises(expected):
        tg.save_weights(tmp_path, preset(), {}, [b"a", b"b"])
    assert len(calls) == at + 1 and names(tmp_path) == []


def test_what_another_run_saved_in_the_meantime_stays(tmp_path):
    (tmp_path / "config.json").write_text("theirs")
    save = partial(tg.save_weights, tmp_path, preset(), {}, None)
    refused(tg.RunError, save, "config.json", "in the meantime")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("config.json", "theirs")]


def test_a_save_is_not_written_through_somebodys_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "weights.pt.part").symlink_to("../mine")
    tg.save_weights(tmp_path / "save", preset(), {}, None)
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "save" / "weights.pt").is_file() and not (tmp_path / "save" / "weights.pt").is_symlink()


# ---- checkpoints -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_checkpoint_is_held_to_what_an_executor_holds(dtype):
    cfg = preset(dtype=dtype)
    state = executor(cfg).whole_state(tg.Schedule(cfg).at(0))
    assert tg.faults(state["weights"], tg.weight_kinds(cfg)) == ""
    assert tg.faults(state["moments"], tg.moment_kinds(cfg)) == ""


def put(folder: Path, content, step: int = 4) -> Path:
    """A checkpoint of this content with the right hash in its name, instead of the one of step 4."""
    for old in folder.glob("step-0000004-*.pt"):
        old.unlink()
    torch.save(content, folder / "new")
    digest = hashlib.sha256((folder / "new").read_bytes()).hexdigest()
    return (folder / "new").rename(folder / f"step-{step:07d}-{digest}.pt")


def last(folder: Path) -> dict:
    return torch.load(sorted(folder.glob("*.pt"))[-1])


def part(name: str, **changes):
    """Change some fields of a part of a checkpoint, which is named by its path."""
    def change(content: dict) -> None:
        for key in filter(None, name.split(".")):
            content = content[key]
        content.update(changes)
    return change


def lose(name: str, key: str):
    def change(content: dict) -> None:
        for inner in filter(None, name.split(".")):
            content = content[inner]
        del content[key]
    return change


LINES = {"log.txt": "", "log.jsonl": ""}
CONTENTS = {                             # case -> change of a sound checkpoint, what the message says
    "more": (part("", run_dir="elsewhere"), "other content"),
    "less": (lose("", "train_time_ms"), "other content"),
    "lengths.save": (part("lengths", save="elsewhere"), "lengths of another form"),
    "lengths.run_dir": (part("lengths", run_dir="elsewhere"), "lengths of another form"),
    "lengths.none": (lose("lengths", "num_extension_steps"), "lengths of another form"),
    "lengths.word": (part("lengths", num_extension_steps="3"), "lengths of another form"),
    "lengths.bool": (part("lengths", num_extension_steps=True), "lengths of another form"),
    "lengths.other": (part("lengths", num_extension_steps=4), "the flags of the run say"),
    "time": (part("", train_time_ms=float("nan")), "training time"),
    "time.before": (part("", train_time_ms=-1.0), "training time"),
    "hash": (part("", data_sha256="../../x"), "hash of the data"),
    "log": (part("log", done=6), "a log of 6 steps"),
    "log.tokens": (part("log", tokens=-1), "-1 tokens"),
    "log.more": (part("log", run_dir="elsewhere"), "a log of another form"),
    "log.files": (part("log", lines=LINES | {"../mine": ""}), "lines of other files"),
    "log.lines": (part("log", lines=LINES | {"log.jsonl": "nonsense\n"}), "no JSON"),
    "log.nested": (part("log", lines=LINES | {"log.jsonl": "[" * 100_000}), "no JSON"),
    "log.text": (part("log", lines=LINES | {"log.txt": "\ud800"}), "lines that no file can hold"),
    "log.events": (part("log", lines=LINES | {"log.jsonl": "[]\n"}), "no events"),
    "tied": (part("state", tied=False), "tied=False"),
    "tied.word": (part("state", tied="no"), "a state of another form"),
    "counts": (part("state.adam_steps", lm_head=7), "counts of updates"),
    "counts.more": (part("state.adam_steps", new=2), "counts of updates"),
    "shape": (part("state.weights", scalars=torch.zeros(1)), "scalars is (1,)"),
    "dtype": (part("state.weights", x0_lambdas=torch.zeros(11, dtype=torch.int32)), "x0_lambdas is (11,) int32"),
    "names": (part("state.weights", other=torch.zeros(1)), "'other' unknown"),
    "nan": (part("state.weights", x0_lambdas=torch.full((11,), torch.nan)), "x0_lambdas is not finite"),
    "weights": (lose("state.weights", "embed"), "embed missing"),
    "moments": (lose("state.moments", "embed.v"), "embed.v missing"),
    "moments.shape": (part("state.moments", **{"scalars.m": torch.zeros(3)}), "scalars.m is (3,)"),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_a_checkpoint_with_the_right_hash_and_other_content_leads_to_the_one_before(checkpoints, case, capsys):
    change, says = CONTENTS[case]
    content = last(checkpoints)
    change(content)
    bad = put(checkpoints, content)
    path, taken = tg.load_checkpoint(checkpoints, preset(), fabric())
    said = capsys.readouterr().out
    assert path.name.startswith("step-0000002-") and taken["log"]["done"] == 2
    assert f"{bad} as a checkpoint" in said and says in said and "the one before is taken" in said


@pytest.mark.parametrize("content", [None, 7, [1], torch.zeros(3), dict(state=1)], ids=name_of)
def test_what_is_no_checkpoint_leads_to_the_one_before(checkpoints, content, capsys):
    put(checkpoints, content)
    path, _ = tg.load_checkpoint(checkpoints, preset(), fabric())
    assert path.name.startswith("step-0000002-") and "other content than a checkpoint's" in capsys.readouterr().out


@pytest.mark.parametrize("make", [*NO_FILES, *NO_TENSORS], ids=name_of)
@pytest.mark.parametrize("named", ["hash", "word"])
def test_a_newest_checkpoint_of_any_kind_leads_to_the_one_before(checkpoints, make, named, capsys, monkeypatch):
    """Its name has the form of a checkpoint's, and where it is a file at all, its own hash."""
    made = checkpoints / "step-0000006-x.pt"
    make(made)
    if named == "hash":
        content = made.read_bytes() if made.is_file() else b""
        made = made.rename(checkpoints / f"step-0000006-{hashlib.sha256(content).hexdigest()}.pt")
    monkeypatch.chdir(checkpoints)
    path, _ = tg.load_checkpoint(checkpoints, preset(), fabric())
    said = capsys.readouterr().out
    assert path.name.startswith("step-0000004-") and f"{made} as a checkpoint" in said
    if named == "hash" and make in NO_TENSORS:
        check_no_advice(said, checkpoints)


SECONDS = [0.1, 0.2, 0.3, 0.4]
BUDGETS = {                              # case -> budget in the checkpoint of step 4, what the message says
    "none": (None, "other content"), "word": ("12", "other content"), "empty": ({}, "a time budget of another form"),
    "more": (dict(seconds_per_step=SECONDS, fits=[], steps=12), "a time budget of another form"),
    "fits": (dict(seconds_per_step=SECONDS, fits=()), "a time budget of another form"),
    "stages": (dict(seconds_per_step=SECONDS[:3], fits=[]), "times of 3 stages, where the run has 4"),
    "seconds": (dict(seconds_per_step=[0.1, 0.2, "0.3", 0.4], fits=[]), "a step that takes '0.3' s"),
    "no seconds": (dict(seconds_per_step=[0.1, 0.2, 0.0, 0.4], fits=[]), "a step that takes 0.0 s"),
    "nan seconds": (dict(seconds_per_step=[0.1, float("nan"), 0.3, 0.4], fits=[]), "a step that takes nan s"),
    "many seconds": (dict(seconds_per_step=[0.1, 1e9, 0.3, 0.4], fits=[]), "a step that takes 1000000000.0 s")}
FITS = {                                 # case -> fits in the same, what the message says
    "word": (["2"], "a fit of another form, '2'"), "short": ([[2, 5.0]], "a fit of another form"),
    "bool": ([[True, 5.0, 12]], "a fit of another form"), "int ms": ([[2, 5, 12]], "a fit of another form"),
    "long": ([["x" * 10_000, 5.0, 12]], "characters)"),
    "odd": ([[3, 5.0, 12]], "a fit at step 3"), "start": ([[0, 5.0, 12]], "a fit at step 0"),
    "ahead": ([[6, 5.0, 12]], "a fit at step 6"), "twice": ([[2, 5.0, 12], [2, 6.0, 14]], "a fit at step 2"),
    "behind the end": ([[2, 5.0, 6], [4, 6.0, 14]], "a fit at step 4"),
    "nan": ([[2, float("nan"), 12]], "a fit after nan ms"), "too late": ([[2, 1e9, 12]], "a fit after 1000000000.0 ms"),
    "back": ([[2, 5.0, 12], [4, 4.0, 14]], "a fit after 4.0 ms"),
    "too short": ([[2, 5.0, 3]], "a fit at step 2 to 3 steps"), "huge": ([[2, 5.0, 10**9]], "to 1000000000 steps"),
    "over": ([[2, 0.0, 4], [4, 0.0, 4]], "a fit at step 4")}


def budgeted(checkpoints: Path, budget) -> Path:
    """The checkpoint of step 4 as if of a run with this time budget, behind a sound one of step 2."""
    earlier, newest = sorted(checkpoints.glob("*.pt"))
    before = torch.load(earlier) | dict(budget=dict(seconds_per_step=SECONDS, fits=[]))
    content = torch.load(newest)
    if budget is not None:
        content["budget"] = budget
    put(checkpoints, before, step=2)
    earlier.unlink()
    return put(checkpoints, content)


@pytest.mark.parametrize("case", [*BUDGETS, *(f"fits.{name}" for name in FITS)])
def test_a_checkpoint_with_a_mangled_budget_leads_to_the_one_before(checkpoints, case, capsys):
    if case in BUDGETS:
        budget, says = BUDGETS[case]
    else:
        fits, says = FITS[case.removeprefix("fits.")]
        budget = dict(seconds_per_step=SECONDS, fits=fits)
    bad = budgeted(checkpoints, budget)
    path, _ = tg.load_checkpoint(checkpoints, preset(time_budget=1.0), fabric())
    said = capsys.readouterr().out
    assert path.name.startswith("step-0000002-") and f"{bad} as a checkpoint" in said and says in said
    assert len(said) < 1000


def test_fits_that_may_be_are_taken(checkpoints):
    good = dict(seconds_per_step=SECONDS, fits=[[2, 5.0, 9], [4, 5.0, 6]])
    made = budgeted(checkpoints, good)
    path, content = tg.load_checkpoint(checkpoints, preset(time_budget=1.0), fabric())
    assert path == made and content["budget"] == good
    assert tg.with_fits(preset(time_budget=1.0), content).total_steps == 6
    refuse_checkpoints(checkpoints, preset(), "no whole")


def test_a_state_is_held_to_the_fitted_schedule():
    """Of a run that a fit has made longer: at step 8 the plan has parted head and embedding, the run has not."""
    state = dict(weights={}, moments={}, tied=False, adam_steps={})
    fitted = tg.Schedule(preset(), [tg.Fit(2, 5.0, 30)])
    assert tg.wrong_with_state(state, tg.Schedule(preset()), 8).startswith("counts of updates")
    assert tg.wrong_with_state(state, fitted, 8) == "tied=False, where the schedule says True"


def test_a_checkpoint_of_another_model_or_step_is_not_taken(checkpoints):
    folder = checkpoints
    refuse_checkpoints(folder, preset(model_dim=64, head_dim=32), "no whole")
    refuse_checkpoints(folder, preset(dtype="float64"), "no whole")
    moved = put(folder, last(folder), step=6)
    with pytest.raises(tg.DataError, match="a log of 4 steps"):
        tg.read_checkpoint(moved, preset())


def test_a_checkpoint_writes_nowhere_else(checkpoints, tmp_path, monkeypatch):
    """The whole way: its lengths name other folders, it is the only one, and the run ends before it has begun."""
    monkeypatch.chdir(tmp_path)
    content = last(checkpoints)
    content["lengths"] |= dict(save="elsewhere", run_dir="elsewhere")
    for path in checkpoints.glob("*.pt"):
        path.unlink()
    bad = put(checkpoints, content)
    before = names(tmp_path)
    done = run(tmp_path / "again", f"--resume={checkpoints.parent}")
    assert done.status == 2 and str(bad) in done.out and "no whole one" in done.err
    assert names(tmp_path) == before


def test_a_resumed_run_cleans_up_behind_the_one_that_was_killed(checkpoints, tmp_path):
    folder = checkpoints.parent
    for leftover in (folder / ".reserve", checkpoints / "new.pt", checkpoints / "new.pt.part"):
        leftover.write_text("left")
    done = run(tmp_path / "again", f"--resume={folder}", "--max_steps=4", f"--save={tmp_path / 'new'}")
    assert done.status == 0, done.err
    assert names(folder) == ["checkpoints", "log.jsonl", "log.txt", "train_gpt.py"] and len(names(checkpoints)) == 2


def test_only_checkpoints_of_earlier_steps_are_removed(tmp_path):
    """A stranger's later ones in the same folder do not push out what was just written."""
    for step in (2, 4, 100, 200):
        (tmp_path / f"step-{step:07d}-x.pt").touch()
    tg.save_checkpoint(tmp_path, 6, {})
    assert [name[:12] for name in names(tmp_path)] == [
        "step-0000004", "step-0000006", "step-0000100", "step-0000200"]

"""Rows of tables in checkpoints and saves: written by every owner, read at any number of ranks and from either home.

Ranks are processes forked from this one. What damage does to a reader is in test_files.py.
"""
from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from common import Run, executor, fabric, launch, losses, preset
from common import run_apart as run
from torch import Tensor

import train_gpt as tg

LABELS = ("more_bigram_embed", "trigram_embed")
DEVICE = "more_bigram_embed 2 700 stream 1; trigram_embed 3 1000 stream 1"
HOST = DEVICE.replace("stream 1", "stream 1 host")
F64 = ("--dtype=float64", "--adam_lr=0.1")                    # so that a sample is not what any weights would give
CUT = ("--max_steps=9", "--checkpoint_every=2", "--sample_tokens=0")          # leaves the checkpoints of steps 6 and 8
ON = ("--max_steps=0", "--sample_tokens=8")                   # of a resumed run
ROUNDING = 1e-8                          # a fork with a division by small norms passes 1e-9
LONG = pytest.mark.all
WARM_UP = tg.warm_up
Rows = dict[str, dict[str, Tensor]]      # by label: what its files hold, in the order of ids


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Several files of each table and rank; and no warm-up, which leaves no trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "PIECE_ROWS", 64)
        patch.setattr(tg, "warm_up", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Runs of one and of two ranks: whole (with a save), and cut short after the checkpoint of step 8."""
    folder = tmp_path_factory.mktemp("tables")
    for world in (1, 2):
        tables = f"--tables={DEVICE}"
        whole = launch(folder / f"whole{world}", world, tables, *F64, "--checkpoint_every=2", "--sample_tokens=8",
                       f"--save={folder / f'save{world}'}")
        cut = launch(folder / f"cut{world}", world, tables, *F64, *CUT)
        assert [done.status for done in whole + cut] == [0] * 2 * world, whole[0].err + cut[0].err
    return folder


def rows_of(folder: Path) -> Rows:
    """All rows in a checkpoint or a save."""
    found = {}
    for label in LABELS:
        pieces = [torch.load(path) for path in folder.glob(f"rows-{label}-*.pt")]
        order = torch.cat([piece["ids"] for piece in pieces]).sort().indices
        found[label] = {name: torch.cat([piece[name] for piece in pieces])[order] for name in pieces[0]}
    return found


def same(mine: Path, theirs: Path, limit: float = 0) -> bool:
    """Whether two folders hold the same rows, to the last bit or to rounding; ids and last updates always exactly."""
    ours, others = rows_of(mine), rows_of(theirs)
    for label in LABELS:
        for name, x in ours[label].items():
            expected = others[label][name]
            allowed = limit * expected.abs().max() if x.is_floating_point() else 0
            if x.shape != expected.shape or (x - expected).abs().max() > allowed:
                return False
    return True


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / tg.CHECKPOINTS / f"step-{step:07d}"


def validations(folder: Path) -> list[float]:
    """The losses on which all ranks agree: a step's line has the loss of one rank's slots."""
    return [event[3] for event in losses(folder) if event[0] == "val"]


# ---- Resumed ---------------------------------------------------------------------------------------------------------

def test_row_files__every_owner_writes_its_touched_rows(place):
    result, = Run(place / "whole2", 0, "", "").of("result")
    for label in LABELS:
        for rank in range(2):
            paths = sorted(checkpoint(place / "cut2", 8).glob(f"rows-{label}-{rank}of2-*.pt"))
            assert len(paths) > 1, "in pieces"
            ids = torch.cat([torch.load(path)["ids"] for path in paths])
            assert (ids % 2 == rank).all() and (ids.diff() > 0).all()
        assert 0 < len(rows_of(checkpoint(place / "cut2", 8))[label]["ids"]) < result["touched_rows"][label]
        assert list(rows_of(place / "save2")[label]) == ["ids", "rows"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tables", [(), (f"--tables={HOST}", "--checkpoint_every=2")], ids=["same home", "other home"])
def test_load_checkpoint__resumes_bitwise(place, tmp_path, monkeypatch, world, tables):
    """On one rank after a warm-up, which has touched rows."""
    if world == 1:
        monkeypatch.setattr(tg, "warm_up", WARM_UP)
    ranks = launch(tmp_path / "run", world, f"--resume={place / f'cut{world}'}", *ON, *tables,
                   f"--save={tmp_path / 'save'}")
    assert [done.status for done in ranks] == [0] * world, ranks[0].err
    assert losses(tmp_path / "run") == losses(place / f"whole{world}")
    assert same(tmp_path / "save", place / f"save{world}")
    resumed, = ranks[0].of("resumed")
    assert (resumed["step"], resumed["differs"]) == (8, {}), "a home is no difference"
    if tables:
        assert same(checkpoint(tmp_path / "run", 10), checkpoint(place / f"whole{world}", 10)), "with v and last"


@pytest.mark.parametrize("before, world", [
    (1, 2), (2, 1), pytest.param(1, 4, marks=LONG), pytest.param(2, 4, marks=LONG)])
def test_load_checkpoint__another_number_of_ranks_resumes_to_rounding(place, tmp_path, before, world):
    ranks = launch(tmp_path / "run", world, f"--resume={place / f'cut{before}'}", *ON, f"--tables={HOST}",
                   f"--save={tmp_path / 'save'}")
    assert [done.status for done in ranks] == [0] * world, ranks[0].err
    assert validations(tmp_path / "run") == pytest.approx(validations(place / "whole1"), abs=ROUNDING)
    assert same(tmp_path / "save", place / "save1", ROUNDING)


def test_one_rank_and_two_write_the_same_rows_to_rounding(place):
    assert validations(place / "whole2") == pytest.approx(validations(place / "whole1"), abs=ROUNDING)
    assert same(place / "save2", place / "save1", ROUNDING)
    assert same(checkpoint(place / "whole2", 10), checkpoint(place / "whole1", 10), ROUNDING)


OTHER = {"cadence 4": (HOST.replace("host", "host 4"), "--dtype=float64"),
         "bf16": (DEVICE.replace("stream 1", "stream 1 device 2 stochastic"), "--dtype=bfloat16")}


@pytest.mark.parametrize("name", ["cadence 4", pytest.param("bf16", marks=LONG)])
def test_other_tables_resume_bitwise_in_another_home(tmp_path, name):
    tables, dtype = OTHER[name]
    home = tables.replace("host", "device") if "host" in tables else tables.replace("device", "host")
    flags = [f"--tables={tables}", dtype, "--checkpoint_every=2", "--sample_tokens=0"]
    whole = run(tmp_path / "whole", *flags, f"--save={tmp_path / 'save'}")
    cut = run(tmp_path / "cut", *flags, "--max_steps=9")
    done = run(tmp_path / "run", f"--resume={tmp_path / 'cut'}", *ON, f"--tables={home}",
               f"--save={tmp_path / 'again'}")
    assert (whole.status, cut.status, done.status) == (0, 0, 0), done.err
    assert losses(done.folder) == losses(whole.folder) and same(tmp_path / "again", tmp_path / "save")


def on_rank(rank: int) -> bool:
    return os.environ.get("RANK") == str(rank)


def test_load_checkpoint__what_one_rank_cannot_read_leads_all_to_the_one_before(place, tmp_path, monkeypatch):
    sha256 = tg.file_sha256

    def failing(path: Path) -> str:
        if on_rank(1) and path.parent.name == "step-0000008" and path.name.startswith("rows"):
            raise OSError(errno.EIO, "Input/output error")
        return sha256(path)

    monkeypatch.setattr(tg, "file_sha256", failing)
    ranks = launch(tmp_path / "run", 2, f"--resume={place / 'cut2'}", *ON, f"--save={tmp_path / 'save'}")
    assert [done.status for done in ranks] == [0, 0], ranks[0].err
    assert "on rank 1" in ranks[0].out and "Input/output error" in ranks[0].out
    assert ranks[0].of("resumed")[0]["step"] == 6
    assert losses(tmp_path / "run") == losses(place / "whole2") and same(tmp_path / "save", place / "save2")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_own_rows__each_row_has_one_reader(tmp_path, world):
    """Of a file that another number of ranks has written; what it does not have is forgotten."""
    cfg = preset(num_slots=12, stages=tg.parse_value("stages", "192 1 3 1 1 1;192 1 3 1 1 1"), val_batch_tokens=768,
                 val_tokens=768, tables=tg.parse_value("tables", DEVICE))
    ids = torch.tensor([0, 1, 5, 6, 699])
    rows = torch.arange(5.0)[:, None].expand(5, 32).contiguous()
    state = dict(ids=ids, rows=rows, v=torch.ones(5), last=torch.full((5,), 2, dtype=torch.int32))
    contents = []
    for number, part in enumerate((slice(3), slice(3, 5))):
        rows_of_file = {name: x[part].clone() for name, x in state.items()}
        contents.append((f"rows-more_bigram_embed-1of7-{number}.pt", rows_of_file))
    tg.write_folder(tmp_path / "new", "id", contents, fabric())
    found = {}
    for rank in range(world):
        ranks = executor(cfg, world, rank)
        home = ranks.tables["more_bigram_embed"].home
        home.stored.rows[3] = 7
        home.stored.last[3] = 1
        tg.load_rows(tmp_path / "new", tg.read_manifest(tmp_path / "new"), ranks, with_state=True)
        for places, state in home.touched():
            assert (state.last == 2).all() and (state.v == 1).all()
            found |= dict(zip((places * world + rank).tolist(), state.rows[:, 0].tolist()))
    assert found == dict(zip(ids.tolist(), range(5)))


# ---- Stopped while it writes -----------------------------------------------------------------------------------------

def kill_in_a_file() -> None:
    """With half of a file on the disk."""
    sync = tg.sync_to_disk

    def half_written(path: Path) -> None:
        if path.parent.name.startswith("step-0000008") and path.name == "rows-trigram_embed-0of1-1.pt":
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(path)

    tg.sync_to_disk = half_written


def kill_before_the_name() -> None:
    """With all of them written."""
    rename = Path.rename

    def stopped(path: Path, target: Path) -> Path:
        if target.name == "step-0000008":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.rename = stopped


@pytest.mark.parametrize("moment", [kill_in_a_file, kill_before_the_name], ids=lambda moment: moment.__name__)
def test_write_folder__a_killed_run_goes_on_from_the_checkpoint_before(place, tmp_path, monkeypatch, moment):
    with monkeypatch.context() as patch:
        patch.setattr(tg, "sync_to_disk", tg.sync_to_disk)                  # both are put back
        patch.setattr(Path, "rename", Path.rename)
        moment()
        killed = run(tmp_path / "killed", f"--tables={DEVICE}", *F64, *CUT)
    assert killed.status == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "killed" / tg.CHECKPOINTS).iterdir())
    assert left[:2] == ["step-0000004", "step-0000006"] and left[2].startswith("step-0000008.") and len(left) == 3
    done = run(tmp_path / "run", f"--resume={tmp_path / 'killed'}", *ON)
    assert done.status == 0 and losses(done.folder) == losses(place / "whole1"), done.err
    assert done.of("resumed")[0]["step"] == 6


def test_write_folder__a_full_disk_of_one_rank(place, tmp_path, monkeypatch):
    """Its second file has no room: the run goes on without the checkpoint, and weights go to the run directory."""
    sync = tg.sync_to_disk

    def full(path: Path) -> None:
        if on_rank(1) and path.name.endswith("-1.pt") and path.parent.name.startswith(("step-0000004", "full")):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(path)

    monkeypatch.setattr(tg, "sync_to_disk", full)
    ranks = launch(tmp_path / "run", 2, f"--tables={DEVICE}", *F64, "--checkpoint_every=2",
                   f"--save={tmp_path / 'full'}")
    assert [done.status for done in ranks] == [1, 1], ranks[0].err
    assert "No space left on device" in ranks[0].out and "on rank 1" in ranks[0].out
    assert "the run goes on without this checkpoint" in ranks[0].out and "they are in" in ranks[0].out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing half-named"
    assert not list((tmp_path / "run" / tg.CHECKPOINTS).glob("*.part"))
    assert losses(tmp_path / "run") == losses(place / "whole2") and same(tmp_path / "run/save", place / "save2")


# ---- Samples ---------------------------------------------------------------------------------------------------------

def sampled(folder: Path, save: Path) -> str:
    done = run(folder, f"--sample={save}", "--sample_tokens=8")
    assert done.status == 0, done.err
    return done.out.strip().splitlines()[-1]


def test_sample_saved__is_the_runs_text(place, tmp_path):
    """Of one rank and of two: to rounding, they are one. And it depends on the rows."""
    done = run(tmp_path / "run", f"--resume={place / 'cut1'}", *ON)
    text = sampled(tmp_path, place / "save1")
    assert text in done.out and sampled(tmp_path, place / "save2") == text
    shutil.copytree(place / "save1", tmp_path / "save")
    manifest = tg.read_manifest(tmp_path / "save")
    for path in (tmp_path / "save").glob("rows-*.pt"):
        piece = tg.read_tensors(path, manifest)
        torch.save(dict(ids=piece["ids"].clone(), rows=-100 * piece["rows"]), tmp_path / "new")
        (tmp_path / "new").replace(path)
    (tmp_path / "save" / tg.MANIFEST).unlink()
    files = {path.name: dict(sha256=tg.file_sha256(path)) for path in (tmp_path / "save").iterdir()}
    (tmp_path / "save" / tg.MANIFEST).write_text(json.dumps(dict(format=2, files=files)))
    assert sampled(tmp_path, tmp_path / "save") != text


def test_sample_saved__bf16_rows_on_a_cpu(tmp_path):
    done = run(tmp_path / "run", f"--tables={HOST}", "--dtype=bfloat16", "--max_steps=4", f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    assert sampled(tmp_path, tmp_path / "save").startswith("token ids")


def test_sample_saved__keeps_tables_on_the_host_and_no_room_for_gradients(place, monkeypatch, capsys):
    monkeypatch.delitem(tg.HOMES, "device")
    monkeypatch.setattr(tg, "Optimizer", None)
    tg.sample_saved(tg.parse_flags([f"--sample={place / 'save1'}", "--sample_tokens=4"])[1])
    assert capsys.readouterr().out.startswith("token ids")
    cfg = preset(tables=tg.parse_value("tables", HOST))
    table = tg.Executor(cfg, fabric(), tg.attention_reference, precision=None).tables["trigram_embed"]
    assert len(table.cache) == len(table.row_grads) == 0 and len(table.home.stored.rows) == 1000

"""Rows of n-gram tables in checkpoints and saves: every owner writes them, any number of ranks reads them.

They can be read into device or host memory, wherever they were stored. Ranks are forked from this process.
test_files.py tests how damaged files are handled.
"""
from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch
from common import Run, before_flush, full_disk, launch, losses, make_comm, preset, weights
from torch import Tensor

import train_gpt as tg

LABELS = ("more_bigram_embed", "trigram_embed")
DEVICE = "more_bigram_embed 2 700 stream 1; trigram_embed 3 1000 stream 1"
HOST = DEVICE.replace("stream 1", "stream 1 host")
FLOAT64 = ("--dtype=float64", "--adam_lr=0.1")  # a high learning rate, so that samples depend on the training
STOP_AT_9 = ("--max_steps=9", "--sample_tokens=0")            # retains the checkpoints of steps 6 and 8
CONTINUE = ("--max_steps=0", "--sample_tokens=8")             # flags of a resumed run
EVERY_2_STEPS = "--checkpoint_every=2"
LOSS_TOLERANCE = 1e-8                    # absolute
ROW_TOLERANCE = 1e-6                     # relative; errors reach 6e-8 if a fork divides by small norms
WARM_UP = tg.warm_up

pytestmark = pytest.mark.usefixtures("small_pieces")

def run_ok(folder: Path, world_size: int, *flags: str) -> Run:
    """Run on a number of ranks, check that all exit with status 0, and return the run as seen by rank 0."""
    by_rank = launch(folder, world_size, *flags)
    assert [rank.status for rank in by_rank] == [0] * world_size, by_rank[0].err
    return by_rank[0]

@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with one and with two ranks, completely (with a save), and stopped after the checkpoint of step 8."""
    folder = tmp_path_factory.mktemp("tables")
    for world_size in (1, 2):
        flags = f"--tables={DEVICE}", *FLOAT64, EVERY_2_STEPS
        run_ok(folder / f"whole{world_size}", world_size, *flags, "--sample_tokens=8",
               f"--save={folder / f'save{world_size}'}")
        run_ok(folder / f"cut{world_size}", world_size, *flags, *STOP_AT_9)
    return folder

def saved_rows(folder: Path, label: str) -> dict[str, Tensor]:
    """Load all rows of a checkpoint or save, in the order of their ids."""
    chunks = [torch.load(path) for path in folder.glob(f"rows-{label}-*.pt")]
    order = torch.cat([chunk["ids"] for chunk in chunks]).sort().indices
    return {name: torch.cat([chunk[name] for chunk in chunks])[order] for name in chunks[0]}

def rows_equal(directory: Path, other: Path, tolerance: float = 0) -> bool:
    """Return whether two directories contain the same rows, within a tolerance; ids and last updates always exactly."""
    for label in LABELS:
        expected = saved_rows(other, label)
        for name, x in saved_rows(directory, label).items():
            max_error = tolerance * expected[name].abs().max() if x.is_floating_point() else 0
            if x.shape != expected[name].shape or (x - expected[name]).abs().max() > max_error:
                return False
    return True

def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return run_dir / tg.CHECKPOINT_DIR / f"step-{step:07d}"

def val_losses(folder: Path) -> list[float]:
    """Return the validation losses, which are equal on all ranks; the loss of a step is that of one rank's sequences.
    """
    return [event[3] for event in losses(folder) if event[0] == "val"]


# ---- Resumed runs ----------------------------------------------------------------------------------------------------
def test_touched_row_files__every_owner_writes_its_touched_rows(runs) -> None:
    """A checkpoint of two ranks has several files per rank and table, with the rows that the rank owns and updated."""
    result, = Run(runs / "whole2", 0, "", "").of("result")
    for label in LABELS:
        for rank in range(2):
            paths = sorted(checkpoint_dir(runs / "cut2", 8).glob(f"rows-{label}-{rank}of2-*.pt"))
            assert len(paths) > 1, "several files"
            ids = torch.cat([torch.load(path)["ids"] for path in paths])
            assert (ids % 2 == rank).all() and (ids.diff() > 0).all()
        assert 0 < len(saved_rows(checkpoint_dir(runs / "cut2", 8), label)["ids"]) < result["touched_rows"][label]
        assert saved_rows(runs / "save2", label).keys() == {"ids", "rows", "v", "last"}

@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tables", [(), (f"--tables={HOST}", EVERY_2_STEPS)], ids=["same location", "other location"])
def test_load_checkpoint__resumes_bitwise(runs, tmp_path, monkeypatch, world_size, tables) -> None:
    """A resumed run has the losses, rows and weights of an uninterrupted one, also if tables move to host memory.

    On one rank, it resumes after a warm-up, which has updated rows.
    """
    if world_size == 1:
        monkeypatch.setattr(tg, "warm_up", WARM_UP)
    resumed_run = run_ok(tmp_path / "run", world_size, f"--resume={runs / f'cut{world_size}'}", *CONTINUE, *tables,
                         f"--save={tmp_path / 'save'}")
    assert losses(tmp_path / "run") == losses(runs / f"whole{world_size}")
    assert rows_equal(tmp_path / "save", runs / f"save{world_size}")
    assert weights(tmp_path / "save") == weights(runs / f"save{world_size}")
    resumed, = resumed_run.of("resumed")
    assert (resumed["step"], resumed["differs"]) == (8, {}), "the location of a table is no difference"
    if tables:
        expected = checkpoint_dir(runs / f"whole{world_size}", 10)
        assert rows_equal(checkpoint_dir(tmp_path / "run", 10), expected), "rows, v and last"

@pytest.mark.parametrize("saved_world_size, world_size", [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_load_checkpoint__another_number_of_ranks_resumes_to_rounding(runs, tmp_path, saved_world_size,
                                                                      world_size) -> None:
    """A checkpoint can be resumed with another number of ranks; results differ by rounding only."""
    run_ok(tmp_path / "run", world_size, f"--resume={runs / f'cut{saved_world_size}'}", *CONTINUE, f"--tables={HOST}",
           f"--save={tmp_path / 'save'}")
    assert val_losses(tmp_path / "run") == pytest.approx(val_losses(runs / "whole1"), abs=LOSS_TOLERANCE)
    assert rows_equal(tmp_path / "save", runs / "save1", ROW_TOLERANCE)

def test_touched_row_files__of_one_rank_and_of_two_are_the_same_to_rounding(runs) -> None:
    """Runs with one and with two ranks save the same rows, up to rounding."""
    assert val_losses(runs / "whole2") == pytest.approx(val_losses(runs / "whole1"), abs=LOSS_TOLERANCE)
    assert rows_equal(runs / "save2", runs / "save1", ROW_TOLERANCE)
    assert rows_equal(checkpoint_dir(runs / "whole2", 10), checkpoint_dir(runs / "whole1", 10), ROW_TOLERANCE)

@pytest.mark.parametrize("world_size, tables, moved_tables, dtype", [
    (1, HOST.replace("host", "host 4"), DEVICE.replace("stream 1", "stream 1 device 4"), "float64"),
    (2, DEVICE, HOST, "bfloat16")], ids=["update_every 4", "bf16"])
def test_load_checkpoint__other_tables_resume_bitwise_in_another_location(tmp_path, world_size, tables, moved_tables,
                                                                          dtype) -> None:
    """Tables with update_every 4, and tables in bf16, resume bitwise in the other location."""
    flags = f"--tables={tables}", f"--dtype={dtype}", "--checkpoint_every=4", "--sample_tokens=0"
    run_ok(tmp_path / "whole", world_size, *flags, f"--save={tmp_path / 'save'}")
    run_ok(tmp_path / "run", world_size, f"--resume={tmp_path / 'whole'}", f"--tables={moved_tables}",
           f"--save={tmp_path / 'again'}")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and rows_equal(tmp_path / "again", tmp_path / "save")
    assert weights(tmp_path / "again") == weights(tmp_path / "save")

def on_rank(rank: int) -> bool:
    return os.environ.get("RANK") == str(rank)

def test_load_checkpoint__if_one_rank_cannot_read_all_use_the_previous_checkpoint(runs, tmp_path, monkeypatch) -> None:
    """A read error on one rank makes all ranks resume from the previous checkpoint, with a warning."""
    sha256 = tg.file_sha256

    def failing(path: Path) -> str:
        if on_rank(1) and path.parent.name == "step-0000008" and path.name.startswith("rows"):
            raise OSError(errno.EIO, "Input/output error")
        return sha256(path)

    monkeypatch.setattr(tg, "file_sha256", failing)
    resumed_run = run_ok(tmp_path / "run", 2, f"--resume={runs / 'cut2'}", *CONTINUE, f"--save={tmp_path / 'save'}")
    assert "on rank 1" in resumed_run.out and "Input/output error" in resumed_run.out
    assert resumed_run.of("resumed")[0]["step"] == 6
    assert losses(tmp_path / "run") == losses(runs / "whole2") and rows_equal(tmp_path / "save", runs / "save2")


# ---- Interrupted writes ----------------------------------------------------------------------------------------------
def kill_in_a_file(patch: pytest.MonkeyPatch) -> None:
    """Kill the process while it writes a file of rows."""
    def half_written(path: Path) -> None:
        if path.name == "rows-trigram_embed-0of1-1.pt":
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    before_flush(patch, half_written, "step-0000008")

def kill_before_the_name(patch: pytest.MonkeyPatch) -> None:
    """Kill the process after it has written all files of a checkpoint, before the directory is renamed."""
    rename = Path.rename

    def kill_or_rename(path: Path, target: Path) -> Path:
        if target.name == "step-0000008":
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)
    patch.setattr(Path, "rename", kill_or_rename)

@pytest.mark.parametrize("kill", [kill_in_a_file, kill_before_the_name])
def test_write_directory__a_killed_run_resumes_from_the_previous_checkpoint(runs, tmp_path, monkeypatch, kill) -> None:
    """A killed process leaves a partial directory, and the run resumes from the checkpoint before it."""
    with monkeypatch.context() as patch:
        kill(patch)
        killed, = launch(tmp_path / "killed", 1, f"--tables={DEVICE}", *FLOAT64, EVERY_2_STEPS, *STOP_AT_9)
    assert killed.status == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "killed" / tg.CHECKPOINT_DIR).iterdir())
    assert names[:2] == ["step-0000004", "step-0000006"] and names[2].startswith("step-0000008.") and len(names) == 3
    resumed_run = run_ok(tmp_path / "run", 1, f"--resume={tmp_path / 'killed'}", *CONTINUE)
    assert losses(resumed_run.folder) == losses(runs / "whole1")
    assert resumed_run.of("resumed")[0]["step"] == 6

def test_write_directory__a_full_disk_of_one_rank(runs, tmp_path, monkeypatch) -> None:
    """If one rank cannot write its second file, training continues without the checkpoint.

    The weights are saved to the run directory instead.
    """
    def fail(path: Path) -> None:
        if on_rank(1) and path.name.endswith("-1.pt") and path.parent.name.startswith(("step-0000004", "full")):
            full_disk()

    before_flush(monkeypatch, fail)
    by_rank = launch(tmp_path / "run", 2, f"--tables={DEVICE}", *FLOAT64, EVERY_2_STEPS, f"--save={tmp_path / 'full'}")
    assert [result.status for result in by_rank] == [1, 1], by_rank[0].err
    assert "No space left on device" in by_rank[0].out and "on rank 1" in by_rank[0].out
    assert "continuing without this checkpoint" in by_rank[0].out and "weights saved in " in by_rank[0].out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "no partial directory"
    assert not list((tmp_path / "run" / tg.CHECKPOINT_DIR).glob("*.part"))
    assert losses(tmp_path / "run") == losses(runs / "whole2") and rows_equal(tmp_path / "run/save", runs / "save2")


# ---- Samples ---------------------------------------------------------------------------------------------------------
def test_sample_from_save__prints_the_text_of_the_run(runs, tmp_path) -> None:
    """Saves of runs with one and with two ranks, which differ by rounding, give the text of the run."""
    resumed_run = run_ok(tmp_path / "run", 1, f"--resume={runs / 'cut1'}", *CONTINUE)
    one_rank, two_ranks = (run_ok(tmp_path, 1, f"--sample={runs / f'save{world_size}'}", "--sample_tokens=8").out
                           for world_size in (1, 2))
    assert one_rank == two_ranks and one_rank.strip().splitlines()[-1] in resumed_run.out

def test_sample_from_save__stores_tables_on_the_host_without_gradients(runs, monkeypatch, capsys) -> None:
    """Sampling stores tables in host memory, and allocates neither gradients nor an optimizer."""
    monkeypatch.delitem(tg.ROW_STORES, "device")
    monkeypatch.setattr(tg, "Optimizer", None)
    tg.sample_from_save(tg.load_config([f"--sample={runs / 'save1'}", "--sample_tokens=4"]))
    assert "\ntoken ids" in capsys.readouterr().out
    cfg = preset(tables=tg.parse_value("tables", HOST))
    table = tg.Engine(cfg, make_comm(), tg.attention_reference, head_precision=None).tables["trigram_embed"]
    assert len(table.cache) == len(table.row_grads) == 0 and len(table.store.shard.rows) == 1000

"""Rows of tables in files: pieces of checkpoints and saves, by every owner, for any number of ranks and either home.

table_file_cases.py is started once, for runs of two ranks and for runs that are killed; here its files are compared
with those of one rank. Other cases change one thing of a sound checkpoint or save and ask the function that reads it.
"""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import table_file_cases as cases
import torch
from common import ROOT, Run, executor, fabric, losses, preset, recorded_writes, refused, run
from table_file_cases import CUT, MOMENTS, SMALL_PIECES, TABLES
from torch import Tensor

import train_gpt as tg

WARM_UP = tg.warm_up
LABELS = ("more_bigram_embed", "trigram_embed")
ROUNDING = 1e-9
Rows = dict[str, dict[str, Tensor]]      # by label: what its pieces hold, in the order of ids


def no_warm_up(*_: object) -> None:
    """It leaves no trace."""


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """And runs without a warm-up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "PIECE_BYTES", SMALL_PIECES)
        patch.setattr(tg, "warm_up", no_warm_up)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folders of runs: whole, one (cut behind the checkpoint of step 8), and all of table_file_cases.py."""
    folder = tmp_path_factory.mktemp("tables")
    whole = run(folder / "whole", *TABLES, "--checkpoint_every=2", f"--save={folder / 'whole_save'}")
    cut = run(folder / "one", *TABLES, *CUT, "--sample_tokens=0")
    assert whole.status == 0 and cut.status == 0, whole.err + cut.err
    (folder / "whole.out").write_text(whole.out)
    launched = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD_SIZE" not in name}
    command = [sys.executable, str(ROOT / "tests/table_file_cases.py"), str(folder)]
    subprocess.run(command, env=launched | {"OMP_NUM_THREADS": "1"}, check=True, timeout=600)
    return folder


def told(place: Path, case: str, rank: int = 0) -> dict:
    """Status and output of a case of two ranks."""
    error = place / f"w2/{case}.{rank}.error"
    assert not error.exists(), error.read_text()
    return json.loads((place / f"w2/{case}.{rank}.json").read_text())


def rows_in(paths: list[Path]) -> dict[str, Tensor]:
    pieces = [torch.load(path) for path in paths]
    order = torch.cat([piece["ids"] for piece in pieces]).sort().indices
    return {name: torch.cat([piece[name] for piece in pieces])[order] for name in pieces[0]}


def saved_rows(folder: Path, step: int = 12) -> Rows:
    """What a folder holds of this step, table by table."""
    return {label: rows_in(sorted(folder.glob(f"rows-{step:07d}-{label}-*.pt"))) for label in LABELS}


def same_bits(mine: Rows, theirs: Rows) -> bool:
    return all(torch.equal(x, theirs[label][name]) for label in LABELS for name, x in mine[label].items())


def alike(mine: Rows, theirs: Rows) -> bool:
    """To rounding; ids and last events to the last bit."""
    for label in LABELS:
        for name, x in mine[label].items():
            expected = theirs[label][name]
            limit = ROUNDING * expected.abs().max() if x.is_floating_point() else 0
            if (x - expected).abs().max() > limit:
                return False
    return True


def losses_alike(mine: Path, theirs: Path) -> bool:
    """In every validation: a step's line has the loss of one rank's slots."""
    def validations(folder: Path) -> list[float]:
        return [event[3] for event in losses(folder) if event[0] == "val"]
    return len(validations(mine)) == 4 and validations(mine) == pytest.approx(validations(theirs), abs=ROUNDING)


def leftovers(folder: Path) -> list[str]:
    """Pieces of no checkpoint, and parts of files."""
    steps = [path.name[5:12] for path in folder.glob("step-*.pt")]
    return [path.name for path in folder.iterdir() if path.name[5:12] not in steps or path.suffix == ".part"]


# ---- resumed, at any number of ranks and in either home --------------------------------------------------------------

def test_a_checkpoint_holds_touched_rows_in_pieces(place):
    folder = place / "one" / tg.CHECKPOINTS
    result, = Run(place / "whole", 0, "", "").of("result")
    for label in LABELS:
        for step in (6, 8):
            paths = sorted(folder.glob(f"rows-{step:07d}-{label}-0of1-*.pt"))
            assert len(paths) > 2 and [tg.Piece.named(path.name).number for path in paths] == list(range(len(paths)))
        assert 0 < len(rows_in(paths)["ids"]) < result["touched_rows"][label]
        for path in paths:
            assert hashlib.sha256(path.read_bytes()).hexdigest() in path.name
            assert path.stat().st_size < SMALL_PIECES + 10_000
    assert leftovers(folder) == [] and len(list(folder.glob("step-*.pt"))) == 2


@pytest.mark.parametrize("flags", [(), ("--table_home=host", "--checkpoint_every=2")], ids=["same home", "other home"])
def test_one_rank_resumes_bitwise(place, tmp_path, monkeypatch, flags):
    """Behind a warm-up, which has touched rows."""
    monkeypatch.setattr(tg, "warm_up", WARM_UP)
    done = run(tmp_path / "run", f"--resume={place / 'one'}", "--max_steps=0", *flags, f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    assert losses(done.folder) == losses(place / "whole")
    assert same_bits(saved_rows(tmp_path / "save"), saved_rows(place / "whole_save"))
    if flags:
        checkpoints = [folder / tg.CHECKPOINTS for folder in (done.folder, place / "whole")]
        assert same_bits(*(saved_rows(folder, 10) for folder in checkpoints)), "with v and last"


OTHER_RULES = {
    "from the host": ("--table_home=host",), "cadence 4": ("--table_cadence=4", "--table_home=host"),
    "bf16": ("--dtype=bfloat16", "--table_rounding=stochastic"), "one by Adam": ("--table_rule=adam",)}


LONG = pytest.mark.all


@pytest.mark.parametrize("name", ["cadence 4", *(pytest.param(name, marks=LONG) for name in OTHER_RULES
                                                 if name != "cadence 4")])
def test_other_tables_resume_bitwise_on_the_device(tmp_path, name):
    flags = [*TABLES, *OTHER_RULES[name]]
    whole = run(tmp_path / "whole", *flags, "--sample_tokens=0", f"--save={tmp_path / 'save'}")
    cut = run(tmp_path / "cut", *flags, *CUT, "--sample_tokens=0")
    assert whole.status == 0 and cut.status == 0, whole.err + cut.err
    done = run(tmp_path / "run", f"--resume={tmp_path / 'cut'}", "--max_steps=0", "--table_home=device",
               f"--save={tmp_path / 'again'}")
    assert done.status == 0 and losses(done.folder) == losses(whole.folder), done.err
    if name == "one by Adam":
        weights = [torch.load(tmp_path / folder / "weights.pt")["trigram_embed"] for folder in ("save", "again")]
        assert torch.equal(*weights) and not list((tmp_path / "save").glob(tg.PIECES))
    else:
        assert same_bits(saved_rows(tmp_path / "again"), saved_rows(tmp_path / "save"))


@pytest.mark.parametrize("case", ["two_to_two", "two_to_host", "damaged"])
def test_two_ranks_resume_bitwise(place, case):
    assert told(place, case)["status"] == 0, told(place, case)["err"]
    assert losses(place / case) == losses(place / "two")
    assert same_bits(saved_rows(place / f"{case}_save"), saved_rows(place / "two_save"))


def test_what_one_rank_misses_leads_all_to_the_checkpoint_before(place):
    resumed, = Run(place / "damaged", 0, "", "").of("resumed")
    assert resumed["step"] == 6
    said = told(place, "damaged")["out"]
    assert "as a piece of step-0000008-" in said and "No such file" in said


def test_one_rank_and_two_write_the_same_rows_to_rounding(place):
    assert told(place, "whole")["status"] == 0
    assert losses_alike(place / "two", place / "whole")
    assert alike(saved_rows(place / "two_save"), saved_rows(place / "whole_save"))
    checkpoints = [place / name / tg.CHECKPOINTS for name in ("two", "whole")]
    assert alike(*(saved_rows(folder, 10) for folder in checkpoints)), "with v and last"


def test_another_number_of_ranks_resumes_to_rounding(place, tmp_path):
    assert told(place, "one_to_two")["status"] == 0, told(place, "one_to_two")["err"]
    done = run(tmp_path / "run", f"--resume={place / 'two_cut'}", "--max_steps=0", "--table_home=host",
               f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    for mine, save in (place / "one_to_two", place / "one_to_two_save"), (done.folder, tmp_path / "save"):
        assert losses_alike(mine, place / "whole")
        assert alike(saved_rows(save), saved_rows(place / "whole_save"))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_a_rank_reads_every_piece_that_may_have_its_rows(before, world):
    pieces = [tg.Piece(2, "x", owner, before, 0, "0" * 64) for owner in range(before)]
    for rank in range(world):
        names = tg.pieces_to_read([f"{piece}.pt" for piece in pieces], fabric(rank, world))
        owners = {row % before for row in range(rank, 12 * world, world)}
        assert {tg.Piece.named(name).rank for name in names} == owners


# ---- stopped while it writes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("moment", [pytest.param(moment.__name__, marks=[LONG] * (number > 0))
                                    for number, moment in enumerate(MOMENTS)])
def test_a_run_killed_while_it_writes_goes_on_from_the_checkpoint_before(place, tmp_path, moment):
    killed = Path(shutil.copytree(place / moment, tmp_path / "killed"))
    folder = killed / tg.CHECKPOINTS
    assert any(name.startswith("rows-0000008-") for name in leftovers(folder))
    with tg.pieces_without_a_name(folder):
        tg.remove_pieces(folder, "rows-*")
        assert leftovers(folder), "somebody may be writing them"
    done = run(tmp_path / "run", f"--resume={killed}", "--max_steps=0")
    assert done.status == 0 and losses(done.folder) == losses(place / "whole"), done.err
    resumed, = done.of("resumed")
    assert resumed["step"] == 6 and leftovers(folder) == []


def test_a_full_disk_of_one_rank_ends_all_and_leaves_no_piece(place):
    for rank in range(2):
        ended = told(place, "full_checkpoint", rank)
        assert ended["status"] == 1 and "No space left on device" in ended["err"] and "on rank 1" in ended["err"]
    assert list((place / "full_checkpoint" / tg.CHECKPOINTS).glob("*0000004*")) == []


def test_a_save_that_one_rank_has_no_room_for_goes_to_the_run_directory(place):
    assert [told(place, "full_save", rank)["status"] for rank in range(2)] == [1, 1]
    assert "they are in" in told(place, "full_save")["out"] and list((place / "full").iterdir()) == []
    assert same_bits(saved_rows(place / "full_save/save"), saved_rows(place / "two_save"))


class Stopped(Exception):
    """What no `except OSError` holds up."""


@pytest.mark.parametrize("error", [Stopped(), OSError(28, "No space left on device")], ids=["signal", "disk"])
@pytest.mark.parametrize("at", [0, 3, 9, 14])
def test_a_checkpoint_that_is_stopped_leaves_the_one_before_alone(place, tmp_path, monkeypatch, error, at):
    """Between parts, and between names."""
    folder = Path(shutil.copytree(place / "one" / tg.CHECKPOINTS, tmp_path / tg.CHECKPOINTS))
    before = sorted(folder.iterdir())
    content = torch.load(max(folder.glob("step-*.pt")))
    rename = Path.rename
    calls = []

    def stop(path: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) > at:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stop)
    tables = tables_of(folder)
    with pytest.raises((Stopped, tg.RunError)), tg.pieces_of_all(folder, 10, tables, True, fabric()) as pieces:
        tg.save_checkpoint(folder, 10, content, pieces)
    assert len(calls) == at + 1 and sorted(folder.iterdir()) == before


def tables_of(folder: Path) -> dict[str, tg.EventTable]:
    """The tables of an executor with the rows of the checkpoint of step 8."""
    cfg = config()
    found = tg.Executor(cfg, fabric(), tg.attention_reference, "plain")
    _, content = tg.load_checkpoint(folder, cfg, fabric())
    tg.load_tables(folder, cfg, content["tables"], content["state"]["adam_steps"], found.rowwise_tables(), fabric())
    return found.rowwise_tables()


def test_pieces_are_flushed_and_named_before_the_checkpoint_is(place, tmp_path, monkeypatch):
    tables = tables_of(place / "one" / tg.CHECKPOINTS)
    calls = recorded_writes(monkeypatch)
    with tg.pieces_of_all(tmp_path, 8, tables, True, fabric()) as pieces:
        tg.save_checkpoint(tmp_path, 8, {}, pieces)
    named = [call for call in calls if isinstance(call, str) and call.endswith(".pt")]
    checkpoint, = tmp_path.glob("step-*.pt")
    assert named == [*pieces, checkpoint.name] and len(pieces) > 6
    first_name = calls.index(named[0])
    flushed = {(tmp_path / name).stat().st_ino for name in named}
    assert flushed <= set(calls[:first_name])
    folder = tmp_path.stat().st_ino
    assert calls[-3:] == [folder, checkpoint.name, folder], "the pieces' names last before the checkpoint has its own"


# ---- what a checkpoint may hold --------------------------------------------------------------------------------------

def config(**changes) -> tg.Config:
    fields = dict(trigram_rows=1000, more_bigram_rows=700, table_signs=1, dtype="float64")
    return preset(**fields | changes)


@pytest.fixture
def checkpoints(place, tmp_path) -> Path:
    """The checkpoints of steps 6 and 8, to be changed."""
    return Path(shutil.copytree(place / "one" / tg.CHECKPOINTS, tmp_path / tg.CHECKPOINTS))


def newest_pieces(folder: Path) -> list[Path]:
    return sorted(folder.glob("rows-0000008-trigram_embed-*.pt"))


def flip_a_bit(folder: Path) -> None:
    path = newest_pieces(folder)[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(folder: Path) -> None:
    path = newest_pieces(folder)[-1]
    os.truncate(path, path.stat().st_size // 2)


def remove(folder: Path) -> None:
    newest_pieces(folder)[0].unlink()


def swap(folder: Path) -> None:
    first, second, *_ = newest_pieces(folder)
    first.rename(folder / "first")
    second.rename(first)
    (folder / "first").rename(second)


def make_fifo(folder: Path) -> None:
    remove(folder)
    os.mkfifo(folder / newest_names(folder)[0])


def newest_names(folder: Path) -> list[str]:
    content = torch.load(max(folder.glob("step-*.pt")))
    return content["tables"][1]["pieces"]


def name_of(function: Callable) -> str:
    return function.__name__


DAMAGES = {flip_a_bit: "damaged", truncate: "damaged", remove: "No such file", swap: "damaged", make_fifo: "named pipe"}


@pytest.mark.parametrize("damage", DAMAGES, ids=name_of)
def test_a_damaged_piece_leads_to_the_checkpoint_before(checkpoints, capsys, damage):
    damage(checkpoints)
    path, content = tg.load_checkpoint(checkpoints, config(), fabric())
    said = capsys.readouterr().out
    assert path.name.startswith("step-0000006-") and content["log"]["done"] == 6
    assert "rows-0000008-trigram_embed-0of1-" in said and DAMAGES[damage] in said


def write_checkpoint(folder: Path, content: dict) -> None:
    """The checkpoint of step 8 with another content and the right hash in its name."""
    for old in folder.glob("step-0000008-*.pt"):
        old.unlink()
    torch.save(content, folder / "new")
    digest = hashlib.sha256((folder / "new").read_bytes()).hexdigest()
    (folder / "new").rename(folder / f"step-0000008-{digest}.pt")


def write_piece(folder: Path, number: int, content: object) -> None:
    """Another content of a piece of the trigrams, under names that have the right hashes."""
    checkpoint = torch.load(max(folder.glob("step-*.pt")))
    names = checkpoint["tables"][1]["pieces"]
    torch.save(content, folder / "piece")
    digest = hashlib.sha256((folder / "piece").read_bytes()).hexdigest()
    renamed = tg.Piece.named(names[number])._replace(sha256=digest)
    names[number] = f"{renamed}.pt"
    (folder / "piece").rename(folder / names[number])
    write_checkpoint(folder, checkpoint)


PIECES = {                               # case -> what the message says of the second piece of a table
    "descending": "rows that do not ascend", "twice in a piece": "rows that do not ascend",
    "of the piece before": "rows that do not ascend, behind row", "below 0": "rows that do not ascend",
    "behind the end": "row 1000 of a table of 1000", "i32 ids": "ids is", "2-D ids": "ids is",
    "no ids": "with their numbers", "words": "with their numbers", "no rows": "not 1 to 1000 rows",
    "many": "not 1 to 1000 rows", "f32 rows": "rows is", "narrow": "rows is", "fewer rows": "rows is",
    "fewer v": "v is", "nan": "rows is not finite", "infinite": "v is not finite",
    "negative": "a second moment below 0",
    "no v": "v missing", "untouched": "events 0 to", "ahead": "to 5, of 1 to 4", "more": "'new' unknown",
    "nothing": "with their numbers"}


def put(x: Tensor, at: int, value: float) -> Tensor:
    changed = x.clone()
    changed[at] = value
    return changed


def other_pieces(piece: dict[str, Tensor]) -> dict[str, object]:
    """Case of the table above -> content of the piece."""
    ids, rows, v, last = piece["ids"], piece["rows"], piece["v"], piece["last"]
    without_ids = dict(rows=rows, v=v, last=last)
    without_v = dict(ids=ids, rows=rows, last=last)
    same_row = torch.zeros(1, dtype=torch.int64).expand(10**12)
    return {
        "descending": piece | dict(ids=ids.flip(0)), "twice in a piece": piece | dict(ids=put(ids, 1, ids[0])),
        "of the piece before": piece | dict(ids=put(ids, 0, 1)), "below 0": piece | dict(ids=put(ids, 0, -1)),
        "behind the end": piece | dict(ids=put(ids, -1, 1000)), "i32 ids": piece | dict(ids=ids.int()),
        "2-D ids": piece | dict(ids=ids[None]), "no ids": without_ids, "words": piece | dict(ids="0 1 2"),
        "no rows": {name: x[:0] for name, x in piece.items()}, "many": piece | dict(ids=same_row),
        "f32 rows": piece | dict(rows=rows.float()), "narrow": piece | dict(rows=rows[:, 1:].clone()),
        "fewer rows": piece | dict(rows=rows[1:]), "fewer v": piece | dict(v=v[1:]),
        "nan": piece | dict(rows=put(rows, 3, torch.nan)), "infinite": piece | dict(v=put(v, 3, torch.inf)),
        "negative": piece | dict(v=put(v, 3, -1.0)), "no v": without_v, "untouched": piece | dict(last=put(last, 3, 0)),
        "ahead": piece | dict(last=put(last, 3, 5)), "more": piece | dict(new=torch.zeros(1)), "nothing": 7}


@pytest.mark.parametrize("case", PIECES)
def test_a_piece_with_the_right_hash_and_other_content_leads_to_the_checkpoint_before(checkpoints, capsys, case):
    sound = torch.load(checkpoints / newest_names(checkpoints)[1])
    write_piece(checkpoints, 1, other_pieces(sound)[case])
    path, _ = tg.load_checkpoint(checkpoints, config(), fabric())
    said = capsys.readouterr().out
    assert path.name.startswith("step-0000006-") and "as rows of trigram_embed" in said and PIECES[case] in said


def test_a_row_of_another_owner_is_refused():
    ids = torch.tensor([1, 3, 4])
    content = dict(ids=ids, rows=torch.zeros(3, 32, dtype=torch.float64))
    owned = tg.Piece(2, "x", 1, 2, 0, "")
    assert "another owner than rank 1 of 2" in tg.wrong_with_piece(content, owned, config(), 1000, None, -1)


RECORDS = {                              # case -> what the message says of the list of tables
    "none": "other content", "word": "other content", "tensors": "another form", "tensors inside": "another form",
    "more": "another form", "one": "the tables ['more_bigram_embed'], where this trainer has",
    "hash": "with hash [1, 3, 5], where this trainer has",
    "order": "the tables ['trigram_embed', 'more_bigram_embed'], where this trainer has", "no pieces": "no list",
    "number": "as a piece of trigram_embed", "elsewhere": "as a piece of trigram_embed",
    "backwards": "in another order", "twice": "in another order", "label": "as a piece of trigram_embed",
    "step": "as a piece of trigram_embed", "rank": "as a piece of trigram_embed", "world": "by 2 and by 1 ranks"}


def other_tables(tables: list[dict]) -> dict[str, object]:
    """Case of the table above -> what a checkpoint says of its tables."""
    first, second = tables
    names = second["pieces"]
    piece = tg.Piece.named(names[0])

    def with_pieces(changed: object) -> list[dict]:
        return [first, second | dict(pieces=changed)]

    def with_first(**changes: object) -> list[dict]:
        return with_pieces([f"{piece._replace(**changes)}.pt", *names[1:]])

    return dict(
        none=None, word="x", tensors=[torch.zeros(3)], more=[first | dict(x=1), second], one=[first],
        hash=[first, second | dict(hash=[1, 3, 5])], order=[second, first], number=with_pieces([3]),
        elsewhere=with_pieces([f"../{names[0]}"]), backwards=with_pieces(names[::-1]), twice=with_pieces(names[:1] * 2),
        label=with_first(label="more_bigram_embed"), step=with_first(step=6), rank=with_first(rank=1),
        world=with_first(world=2)) | {
        "tensors inside": [first | dict(hash=torch.zeros(2)), second], "no pieces": with_pieces(None)}


@pytest.mark.parametrize("case", RECORDS)
def test_another_list_of_tables_leads_to_the_checkpoint_before(checkpoints, capsys, case):
    content = torch.load(max(checkpoints.glob("step-*.pt")))
    changed = other_tables(content["tables"])[case]
    write_checkpoint(checkpoints, content | dict(tables=changed))
    path, _ = tg.load_checkpoint(checkpoints, config(), fabric())
    said = capsys.readouterr().out
    assert path.name.startswith("step-0000006-") and RECORDS[case] in said


def other_constants(monkeypatch, **changes) -> None:
    first, second, *others = tg.NGRAM_TABLES
    monkeypatch.setattr(tg, "NGRAM_TABLES", (first, replace(second, **changes), *others))


def resume_refused(folder: Path, cfg: tg.Config, *parts: str) -> None:
    def load() -> None:
        tg.load_checkpoint(folder, cfg, fabric())
    refused(tg.DataError, load, "no whole one", *parts)


def test_other_constants_are_refused_in_words_that_name_both(checkpoints, monkeypatch):
    before = "trigram_embed with hash [17351, 60961, 45259], where this trainer has [17351, 60961, 45257]"
    other_constants(monkeypatch, hash=(17351, 60961, 45257))
    resume_refused(checkpoints, config(), before)
    other_constants(monkeypatch, hash=(17351, 60961, 45259), sign_hash=(3, 5, 7))
    resume_refused(checkpoints, config(), "sign_hash [58699, 39779, 26801], where this trainer has [3, 5, 7]")
    other_constants(monkeypatch, sign_hash=(58699, 39779, 26801), enters=tg.ATTENTION_LAYERS[0])
    resume_refused(checkpoints, config(), "trigram_embed with enters None, where this trainer has")


def test_other_rows_orders_and_tables_are_refused_in_words_that_name_both(checkpoints, monkeypatch):
    resume_refused(checkpoints, config(trigram_rows=1001), "trigram_embed with rows 1000, where this trainer has 1001")
    resume_refused(checkpoints, config(table_signs=0), "more_bigram_embed with signs 1, where this trainer has 0")
    resume_refused(checkpoints, config(trigram_rows=0), "['more_bigram_embed', 'trigram_embed'], where",
                   "has ['more_bigram_embed']")
    resume_refused(checkpoints, config(trigram_rows=0, more_bigram_rows=0), "where this trainer has []")
    monkeypatch.setattr(tg, "NGRAM_TABLES", tg.NGRAM_TABLES[::-1])
    resume_refused(checkpoints, config(), "['more_bigram_embed', 'trigram_embed'], where this trainer has ['trigram")


def test_a_piece_that_no_checkpoint_names_is_not_read_and_goes_with_the_checkpoint_of_its_step(checkpoints):
    named = newest_pieces(checkpoints)[0]
    stray = checkpoints / named.name.replace("-0000-", "-0999-")
    stray.write_bytes(b"junk")
    path, _ = tg.load_checkpoint(checkpoints, config(), fabric())
    assert path.name.startswith("step-0000008-")
    tg.remove_pieces(checkpoints, "rows-*")
    assert stray.exists()
    for step in (10, 12):
        tg.save_checkpoint(checkpoints, step, {})
    tg.remove_pieces(checkpoints, "rows-*")
    assert list(checkpoints.glob("rows-*")) == []


def test_ranks_that_see_other_checkpoints_say_so(checkpoints, monkeypatch):
    def of_two(self: tg.Fabric, fact: object) -> list:
        return [fact, dict(checkpoints="none")] if isinstance(fact, dict) else [fact, fact]
    monkeypatch.setattr(tg.Fabric, "of_all", of_two)

    def load() -> None:
        tg.load_checkpoint(checkpoints, config(), fabric(0, 2))
    refused(tg.FabricError, load, "checkpoints", "none on rank 1")


# ---- saves -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def save(place, tmp_path) -> Path:
    return Path(shutil.copytree(place / "whole_save", tmp_path / "save"))


def sampled(folder: Path, save: Path, *flags: str) -> str:
    done = run(folder, f"--sample={save}", "--sample_tokens=8", *flags)
    assert done.status == 0, done.err
    return done.out.strip().splitlines()[-1]


def test_a_save_says_all_in_its_manifest(save):
    manifest = json.loads((save / "manifest.json").read_text())
    names = sorted(path.name for path in save.iterdir())
    assert sorted([*manifest["files"], "manifest.json"]) == names and "tables.json" in names
    for name, entry in manifest["files"].items():
        content = (save / name).read_bytes()
        assert entry == dict(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    for rows in saved_rows(save).values():
        assert list(rows) == ["ids", "rows"] and rows["rows"].any()


def test_a_sample_of_a_save_is_the_runs(place, tmp_path):
    """The run of one rank and of two: to rounding, they are one."""
    text = sampled(tmp_path, place / "whole_save")
    assert text in (place / "whole.out").read_text()
    assert sampled(tmp_path, place / "two_save") == text
    assert text in told(place, "whole")["out"]


def test_a_sample_depends_on_the_rows(save, tmp_path):
    """In files that nothing vouches for, other rows give another text."""
    text = sampled(tmp_path, save)
    (save / "manifest.json").unlink()
    for path in save.glob(tg.PIECES):
        piece = torch.load(path)
        piece["rows"] *= -100
        torch.save(piece, path)
    assert sampled(tmp_path, save) != text


def test_bf16_rows_are_sampled_from(tmp_path):
    flags = [*TABLES, "--dtype=bfloat16", "--table_home=host", "--max_steps=4"]
    done = run(tmp_path / "run", *flags, f"--save={tmp_path / 'save'}")
    assert done.status == 0, done.err
    assert sampled(tmp_path, tmp_path / "save").startswith("token ids")


def test_a_sample_keeps_nothing_for_gradients():
    cfg = preset("tiny", trigram_rows=5000)
    table, = tg.Evaluator(cfg, fabric(), tg.attention_reference).rowwise_tables().values()
    assert len(table.cache) == len(table.sums) == 0 and len(table.mine) == 5000
    table, = executor(cfg).rowwise_tables().values()
    assert len(table.cache) == len(table.sums) == 2 * 384, "the ids of a cycle of the largest batch"


def test_a_sample_keeps_tables_on_the_host_and_asks_for_the_room_first(save, monkeypatch, capsys):
    flags = replace(tg.parse_flags([f"--sample={save}", "--sample_tokens=4"])[1], prompt="")
    monkeypatch.delitem(tg.HOMES, "device")
    assert tg.sample_saved(flags) == 0
    capsys.readouterr()
    monkeypatch.setattr(tg.Fabric, "free_host_memory", lambda self: 10_000)
    monkeypatch.delitem(tg.HOMES, "host")
    refused(tg.RunError, lambda: tg.sample_saved(flags), tg.ON_HOST, f"for the rows in {save}", "more memory")


def refuse_sample(save: Path, *parts: str) -> None:
    """On the way of --sample."""
    def load() -> None:
        cfg, _ = tg.load_weights(save, "cpu")
        records = tg.read_tables(save, cfg)
        tables = tg.Evaluator(cfg, fabric(), tg.attention_reference).rowwise_tables()
        tg.load_tables(save, cfg, records, None, tables, fabric())
    with pytest.raises(tg.TrainerError) as caught:
        load()
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_piece_of_a_save_is_held_to_the_manifest(save):
    pieces = sorted(save.glob(tg.PIECES))
    content = bytearray(pieces[0].read_bytes())
    content[len(content) // 2] ^= 1
    pieces[0].write_bytes(content)
    refuse_sample(save, pieces[0].name, "another content")
    pieces[0].unlink()
    refuse_sample(save, pieces[0].name, "No such file")


def test_a_piece_that_a_manifest_does_not_name_is_no_part_of_the_save(save):
    piece = min(save.glob(tg.PIECES))
    stray = save / piece.name.replace("-0000-", "-0999-")
    shutil.copy(piece, stray)
    refuse_sample(save, stray.name, "does not name", "mixed")


def test_what_nothing_vouches_for_is_checked_row_by_row(save):
    (save / "manifest.json").unlink()
    piece = min(save.glob("rows-*-trigram_embed-*.pt"))
    content = torch.load(piece)
    torch.save(content | dict(ids=content["ids"].flip(0)), piece)
    refuse_sample(save, piece.name, "rows that do not ascend")
    torch.save(content | dict(v=torch.zeros(3)), piece)
    refuse_sample(save, piece.name, "'v' unknown")
    piece.write_bytes(b"junk" * 1000)
    refuse_sample(save, piece.name, "would run code when loaded, or is damaged")
    piece.unlink()
    refuse_sample(save, piece.name, "No such file")
    (save / "tables.json").unlink()
    refuse_sample(save, "tables.json", "No such file")


def test_a_save_of_other_constants_is_not_sampled(save, monkeypatch):
    other_constants(monkeypatch, hash=(3, 5, 7))
    refuse_sample(save, "tables.json", "hash [17351, 60961, 45259], where this trainer has [3, 5, 7]")


def test_pieces_of_another_run_are_not_mixed_with_a_save(save, tmp_path):
    for path in save.iterdir():
        if not path.match(tg.PIECES):
            path.unlink()
    before = sorted(save.iterdir())
    done = run(tmp_path / "run", *TABLES, "--max_steps=1", f"--save={save}")
    assert done.status == 2 and f"{tg.PIECES}, of another run" in done.err and sorted(save.iterdir()) == before


def test_parts_of_a_killed_run_are_removed_unless_somebody_writes(tmp_path):
    names = ["rows-0000012-x-0of1-0000.part", f"rows-0000012-x-0of1-0000-{'0' * 64}.pt.part", "rows-of-mine.part"]
    for name in names:
        (tmp_path / name).touch()
    with tg.pieces_without_a_name(tmp_path):
        tg.prepare_save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    tg.prepare_save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rows-of-mine.part"]


def test_a_save_that_is_stopped_leaves_no_piece(place, tmp_path, monkeypatch):
    tables = tables_of(place / "one" / tg.CHECKPOINTS)

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(tg.RunError), tg.pieces_of_all(tmp_path, 8, tables, False, fabric()) as pieces:
        assert len(list(tmp_path.iterdir())) == len(pieces) > 6
        monkeypatch.setattr(tg, "flush_names", full)
        tg.save_weights(tmp_path, config(), {}, None, pieces)
    assert list(tmp_path.iterdir()) == []


# ---- sizes -----------------------------------------------------------------------------------------------------------

def test_a_piece_is_below_a_limit_of_bytes_and_never_empty(monkeypatch):
    cfg = config(dtype="float32")
    table, = [table for table in tg.row_tables(cfg) if table.label == "trigram_embed"]
    found = tg.EventTable(table, cfg, fabric(), 1000, 64, tg.no_report)
    found.home.stored.last[::2] = 1
    width = 4 * cfg.model_dim + 8
    for limit, rows in (100 * width, 100), (1, 1), (2**40, 500):
        monkeypatch.setattr(tg, "PIECE_BYTES", limit)
        counts = [len(ids) for ids, _ in found.touched()]
        assert max(counts) == rows and sum(counts) == 500


def test_a_table_forgets_what_the_pieces_do_not_have():
    cfg = config(dtype="float32")
    table = tg.row_tables(cfg)[-1]
    second = tg.EventTable(table, cfg, fabric(1, 2), 500, 64, tg.no_report)
    second.home.stored.rows[3] = 1
    second.home.stored.last[3] = 1
    rows = torch.arange(4.0)[:, None].expand(4, 32)
    second.load([(torch.tensor([0, 1, 5, 999]), tg.Live(rows, torch.ones(4), torch.ones(4)))])
    (ids, live), = second.touched()
    assert ids.tolist() == [1, 5, 999] and live.rows[:, 0].tolist() == [1, 2, 3]
    assert not second.home.stored.rows[3].any()

"""Room 6 and what it stands on: rows travel both ways, and every bit is that of a dense run on one rank.

row_cases.py is started once and runs every case in real processes over gloo; here its files are compared with a dense
run that knows no ranks, and with rows_reference.py. Gradients are small integers, exact in every type and order, and
depend on the sign of the row that was read: what is stale, lost or doubled changes bits.
"""
from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import row_cases as cases
import rows_reference
import torch
from common import fabric
from row_cases import MODEL_STEPS, MODES, ROW_LABELS, SLOTS, SLOW_WORLD, SPLIT_STEP, STEPS, WIDTH, WORLDS

import train_gpt as tg

ELEMENT = dict(float32=4, bfloat16=2)
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no triton package: its body cannot be translated here")
SLOW = pytest.param(SLOW_WORLD, marks=pytest.mark.all)
worlds = pytest.mark.parametrize("world", [1, 2, 3, SLOW, 8], ids="W{}".format)
modes = pytest.mark.parametrize("mode", MODES)


@dataclass
class Results:
    """Files of row_cases.py, or of table_cases.py."""
    folder: Path

    @functools.cache
    def ranks(self, case: str, world: int) -> list[Any]:
        """What each rank found. Fails with what the ranks said if one found nothing."""
        place = self.folder / f"w{world}"
        files = [place / f"{case}.{rank}.pickle" for rank in range(world)]
        if not all(path.exists() for path in files):
            said = [*sorted(place.glob(f"{case}.*.error")), *(x for x in place.glob("stuck.*") if x.stat().st_size)]
            texts = [f"{path.name}:\n{path.read_text()}" for path in said]
            pytest.fail("\n".join([f"{case} with {world} ranks", *texts]), pytrace=False)
        return [pickle.loads(path.read_bytes()) for path in files]

    def __hash__(self) -> int:
        return hash(self.folder)


def start(folder: Path, *what: str, script: str = "row_cases.py", **environment: str) -> None:
    launched = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD_SIZE" not in name}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / script), str(folder), *what]
    environment = launched | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    folder = tmp_path_factory.mktemp("rows")
    start(folder, *["--all"] * request.config.getoption("--all"))
    return Results(folder)


# ---- The exchange alone ---------------------------------------------------------------------------------------------

@functools.cache
def dense_run(pattern: str, rows: int, dtype: str, cycles: int, zeros: bool) -> tuple[list[np.ndarray], ...]:
    """One rank, whole tables. Returns the table before each cycle and after the last, and m and v."""
    table, m, v = cases.initial(rows, dtype, zeros), torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)
    tables = [cases.exact_array(table)]
    for cycle in range(cycles):
        grad, most = np.zeros((rows, WIDTH), np.float32), np.zeros((rows, WIDTH))
        for step, slot in itertools.product(range(STEPS), range(SLOTS)):
            read = cases.reads(pattern, rows, cycle, step, slot)
            lines = cases.gradient(cycle, step, slot, tables[-1][read])
            np.add.at(grad, read, lines)
            np.add.at(most, read, np.abs(lines))
        assert most.max() <= 256, "bf16 would round"
        cases.adam(table, torch.from_numpy(grad), m, v, cycle)
        tables.append(cases.exact_array(table))
    return tables, m.numpy(), v.numpy()


def rows_of(rank: int, world: int, run: cases.Run, table: int, cycle: int) -> list[np.ndarray]:
    """Logical rows that a rank reads in each step."""
    return [np.concatenate([cases.reads(*run.tables[table], cycle, step, slot) for slot in range(rank, SLOTS, world)])
            for step in range(STEPS)]


def differences(found: list[dict], rank: int, world: int, run: cases.Run) -> list[str]:
    """What a rank saw and holds and should not, table by table."""
    wrong = []
    for k, ((pattern, rows), got) in enumerate(zip(run.tables, found)):
        tables, m, v = dense_run(pattern, rows, run.dtype, run.cycles, run.zeros)
        size = -(-rows // world)

        def compare(name: str, x: np.ndarray, want: np.ndarray) -> None:
            if x.dtype != want.dtype or not np.array_equal(x, want):
                wrong.append(f"{pattern} of {rows}: {name}")

        for cycle, (seen, before) in enumerate(zip(got["cycles"], tables)):
            place = np.asarray(seen["rows_i_read"], np.int64)
            compare(f"rows fetched in cycle {cycle}", seen["fetched"], before[place % size * world + place // size])
            for step, read in enumerate(rows_of(rank, world, run, k, cycle)):
                compare(f"rows read in cycle {cycle}", seen["read"][step], before[read])
            if "cache" in seen:
                compare(f"cache in cycle {cycle}", seen["cache"], np.concatenate(rows_reference.cut(before, world)))
        for name, want in (("mine", tables[-1]), ("m", m), ("v", v)):
            compare(name, got[name], rows_reference.cut(want, world)[rank])
        if (got["whole"] is not None) != (rank == 0):
            wrong.append(f"{pattern} of {rows}: whole table on rank {rank}")
        elif rank == 0:
            compare("whole table", got["whole"], tables[-1])
    return wrong


@worlds
def test_rows_bitwise_dense(results, world):
    ranks = results.ranks("exchange", world)
    for number, run in enumerate(cases.all_runs(world)):
        for rank, found in enumerate(ranks):
            assert differences(found[number], rank, world, run) == [], f"{run} on rank {rank}"


def test_runs_cover_what_they_should():
    """Every pattern in every mode, with 1, 2 and 4 parts of a step and fewer rows than ranks, at every W; every type,
    too, in sparse mode."""
    for world in WORLDS:
        runs, patterns = cases.all_runs(world), set(cases.PATTERNS) - {"once"}
        met = {(name, run.mode, run.dtype) for run in runs for name, _ in run.tables}
        want = set(itertools.product(patterns, MODES if world <= 2 else ("sparse",), ELEMENT))
        assert want <= met and {run.parts for run in runs} == {1, 2, 4}
        assert set(itertools.product(patterns, MODES)) == {(name, mode) for name, mode, _ in met if name != "once"}
        assert set(itertools.product(MODES, ELEMENT)) == {(mode, dtype) for _, mode, dtype in met}
        sizes = {rows for run in runs for _, rows in run.tables}
        assert {rows % world == 0 for rows in sizes} == {True, False} or world == 1
        assert min(sizes) == 1


@pytest.mark.parametrize("world", (1, 3, 4, 8), ids="W{}".format)
def test_rows_reference_is_the_dense_run(world):
    """The explanation of the scheme is right itself."""
    for pattern, rows in itertools.product(set(cases.PATTERNS) - {"once"}, (29, 3)):
        tables, m, v = dense_run(pattern, rows, "float32", 3, False)
        slices, moments = rows_reference.cut(tables[0].copy(), world), [
            rows_reference.cut(np.zeros((rows, WIDTH), np.float32), world) for _ in "mv"]
        run, size = cases.Run(((pattern, rows),), "sparse", "float32", 1), -(-rows // world)
        for cycle in range(3):
            steps = [rows_of(rank, world, run, 0, cycle) for rank in range(world)]
            lists, pieces = rows_reference.plan([np.concatenate(read) for read in steps], rows)
            caches, sums = rows_reference.fetch(slices, rows_reference.exchange(pieces)), []
            for rank in range(world):
                places, lines = [], []
                for step, slot in itertools.product(range(STEPS), range(rank, SLOTS, world)):
                    read = cases.reads(pattern, rows, cycle, step, slot)
                    at = rows_reference.index(read, lists[rank], world, rows)
                    places += at
                    lines.append(cases.gradient(cycle, step, slot, caches[rank][at]).astype(np.float32))
                sums.append(rows_reference.compact(places, np.concatenate(lines), lists[rank]))
            returned = rows_reference.give_back(sums, pieces, size)
            for parts in zip(slices, returned, *moments):
                cases.adam(*map(torch.from_numpy, parts), cycle)
            np.testing.assert_array_equal(rows_reference.whole(slices, rows), tables[cycle + 1], f"{pattern} {rows}")
        for of_owners, want in zip(moments, (m, v)):
            np.testing.assert_array_equal(rows_reference.whole(of_owners, rows), want)


@worlds
def test_plan_matches_bruteforce(results, world):
    """Lists, counts, where a read is found, and what owners learn."""
    ranks = results.ranks("exchange", world)
    for number, run in enumerate(cases.all_runs(world)):
        for k, (_, rows) in enumerate(run.tables):
            for cycle in range(run.cycles):
                steps = [rows_of(rank, world, run, k, cycle) for rank in range(world)]
                lists, pieces = rows_reference.plan([np.concatenate(read) for read in steps], rows)
                asked_by_reader = rows_reference.exchange(pieces)
                for rank in range(world):
                    seen = ranks[rank][number][k]["cycles"][cycle]
                    assert seen["rows_i_read"].tolist() == lists[rank] and seen["rows_i_read"].dtype == np.int64
                    assert seen["counts_by_owner"] == [len(piece) for piece in pieces[rank]]
                    found = [lists[rank][at] for step in seen["index"] for at in step] \
                        if run.mode == "sparse" and world > 1 else np.concatenate(seen["index"]).tolist()
                    read = np.concatenate(steps[rank]).tolist()
                    assert found == [rows_reference.physical(row, world, rows) for row in read]
                    if run.mode != "dense" and world > 1:
                        assert seen["rows_asked_of_me"].tolist() == list(itertools.chain(*asked_by_reader[rank]))
                        assert seen["counts_by_reader"] == [len(piece) for piece in asked_by_reader[rank]]


@worlds
def test_counts_symmetric(results, world):
    """What a rank asks of an owner is what this owner knows to be asked for."""
    ranks = results.ranks("exchange", world)
    for number, run in enumerate(cases.all_runs(world)):
        if run.mode != "dense":
            for k, cycle in itertools.product(range(len(run.tables)), range(run.cycles)):
                seen = [found[number][k]["cycles"][cycle] for found in ranks]
                out, back = (np.array([x[name] for x in seen]) for name in ("counts_by_owner", "counts_by_reader"))
                np.testing.assert_array_equal(out, back.T)


@worlds
def test_rows_empty_lists(results, world):
    """Nothing to some owner, nothing from some rank, nothing at all: all of them occur, in modes that send lists."""
    met = set()
    for number, run in enumerate(cases.all_runs(world)):
        for k, cycle in itertools.product(range(len(run.tables)), range(run.cycles)):
            ranks = results.ranks("exchange", world)
            counts = np.array([found[number][k]["cycles"][cycle]["counts_by_owner"] for found in ranks])
            met |= {name for name, there in dict(
                owner=counts.any() and not counts.any(0).all(), rank=counts.any() and not counts.any(1).all(),
                peer=counts.any(0).all() and counts.any(1).all() and not counts.all(), all=not counts.any()).items()
                if there and run.mode != "dense"}
    assert met == ({"owner", "rank", "peer", "all"} if world > 1 else {"all"})


@worlds
def test_untouched_rows_decay(results, world):
    """Rows read once move on without gradients, exactly as dense; rows never read stay 0, to the bit."""
    runs = cases.all_runs(world)
    for number, run in enumerate(runs):
        if run.zeros:
            for rank, found in enumerate(results.ranks("exchange", world)):
                assert differences(found[number], rank, world, run) == []
            for k, (pattern, rows) in enumerate(run.tables):
                tables, _, _ = dense_run(pattern, rows, run.dtype, run.cycles, True)
                got = results.ranks("exchange", world)[0][number][k]["whole"]
                touched = np.zeros(rows, bool)
                for rank in range(world):
                    touched[np.concatenate(rows_of(rank, world, run, k, 0))] = True
                    assert not any(map(len, rows_of(rank, world, run, k, 1)))
                assert 0 < touched.sum() < rows and not got[~touched].tobytes().strip(b"\0")
                assert all((tables[cycle + 1] != tables[cycle])[touched].any() for cycle in range(run.cycles))
    assert any(run.zeros for run in runs)


@pytest.mark.parametrize("world", (2, SLOW), ids="W{}".format)
@pytest.mark.parametrize("name", ("fetch left out", "fetched early", "list dropped", "row missing"))
def test_rows_stale_is_caught(results, world, name):
    """Controls: the comparison must fail, and for what is stale in the first cycle in which anything can be."""
    ranks, run = results.ranks("faults", world), cases.FAULTY
    assert [differences(found[""], rank, world, run) for rank, found in enumerate(ranks)] == [[]] * world
    wrong = [text for rank, found in enumerate(ranks) for text in differences(found[name], rank, world, run)]
    assert wrong
    if name in ("fetch left out", "fetched early"):
        assert any("rows fetched in cycle 1" in text for text in wrong)
        assert any("rows read in cycle 1" in text for text in wrong)
        assert not any("cycle 0" in text for text in wrong)
    if name == "row missing":
        assert all("in rows of no plan" in found["row missing, debug"] for found in ranks)


@pytest.mark.parametrize("world", (2, SLOW), ids="W{}".format)
def test_buffer_lifetime(results, world):
    """NaN in every buffer of rows as soon as it was waited for changes nothing; a moment earlier it would."""
    for rank, found in enumerate(results.ranks("faults", world)):
        assert differences(found["overwritten after"], rank, world, cases.FAULTY) == []
        assert differences(found["overwritten before"], rank, world, cases.FAULTY) != []


@pytest.mark.parametrize("world", (1, 2, 3), ids="W{}".format)
@modes
def test_debug_rows(results, world, mode):
    """A sound run passes; rows that were not fetched are NaN; a gradient of a row outside of the plan ends the run."""
    run = cases.replace(cases.FAULTY, mode=mode, debug=1)
    for rank, found in enumerate(results.ranks("debug", world)):
        assert differences(found[mode], rank, world, run) == []
        poisoned = [seen["poisoned"] for table in found[mode] for seen in table["cycles"] if "poisoned" in seen]
        assert len(poisoned) == (mode == "sparse" and world > 1) * len(run.tables) * run.cycles and all(poisoned)
        if mode != "dense" or world > 1:                                      # else all of it is cleared, not rows
            assert "in rows of no plan" in found[f"{mode}, outside"]


@pytest.mark.parametrize("world", (1, 2), ids="W{}".format)
@modes
def test_batches_of_two_cycles(results, world, mode):
    """Their gradients add up on one rank; on several it is said that they do not. Nothing is lost in silence."""
    for found in results.ranks("two_cycles", world):
        assert found[mode] == 4 * WIDTH if world == 1 else "gradients of bigram_embed" in found[mode]


@pytest.mark.parametrize("world", (1, 2, SLOW), ids="W{}".format)
@modes
def test_another_plan_than_the_one_fetched_ahead(results, world, mode):
    """The cache is of the plan that is asked for, and no rows that come late are among them."""
    for found in results.ranks("refetch", world):
        assert found[mode, "cached"] and found[mode, "on their way"]


@pytest.mark.parametrize("world", (1, 2), ids="W{}".format)
@modes
def test_reset_in_the_middle_of_a_cycle(results, world, mode):
    for found in results.ranks("reset", world):
        assert found[mode, True].any() and found[mode, True].tobytes() == found[mode, False].tobytes()


@pytest.mark.parametrize("world", (3, SLOW), ids="W{}".format)
@pytest.mark.parametrize("mode", ("sparse", "sparse_scatter"))
def test_owners_add_in_the_order_of_ranks(results, world, mode):
    """Numbers whose sum depends on the order: rank 0 first, the owner's own at its place."""
    def total(ranks: range) -> np.ndarray:
        return functools.reduce(np.add, [cases.addends(rank).numpy() for rank in ranks])

    got = rows_reference.whole([found[mode] for found in results.ranks("rank_order", world)], 20)
    np.testing.assert_array_equal(got, total(range(world)))
    assert not np.array_equal(got, total(range(world)[::-1])), "this test cannot tell"


# ---- Bytes ----------------------------------------------------------------------------------------------------------

FACTS = 7 * 8                            # of a list: purpose, cycle, tokens, dtype, table, rows, checksum, i64 each


@worlds
def test_bytes_formula(results, world):
    """Accounts of tables and cycles against the formulas of the exchange, and against what collectives were given."""
    ranks = results.ranks("exchange", world)
    for number, run in enumerate(cases.all_runs(world)):
        for rank in range(world):
            element, sums = ELEMENT[run.dtype] * WIDTH, dict(bytes_sent=0, bytes_received=0)
            for k, (_, rows) in enumerate(run.tables):
                accounts, size = ranks[rank][number][k]["accounts"], -(-rows // world)
                assert len(accounts) == run.cycles
                for cycle, (account, seen) in enumerate(zip(accounts, ranks[rank][number][k]["cycles"])):
                    mine, theirs = (sum(n for k, n in enumerate(seen[name]) if k != rank)
                                    for name in ("counts_by_owner", "counts_by_reader"))
                    slices, facts = (world - 1) * size * element, (world - 1) * FACTS
                    if world == 1:
                        sent = received = 0
                    elif run.mode == "dense":
                        sent = received = 2 * slices
                    else:                                                     # lists out, rows in, gradients out
                        sent = facts + 4 * mine + element * mine
                        received = facts + 4 * theirs + element * theirs
                        sent += slices if run.mode == "sparse_scatter" else element * theirs
                        received += slices if run.mode == "sparse_scatter" else element * mine
                    assert account.pop("plan_ms") >= 0
                    assert account == dict(
                        purpose="train", cycle=cycle, tokens=SLOTS, table=f"table {k}", mode=run.mode,
                        rows=len(seen["rows_i_read"]), bytes_sent=sent, bytes_received=received, bytes_dense=2 * slices)
                    sums = {key: sums[key] + account[key] for key in sums}
            assert ranks[rank][number][0]["seen"] == dict(sent=sums["bytes_sent"], received=sums["bytes_received"])


# ---- Ranks that disagree, lists that are wrong ----------------------------------------------------------------------

@pytest.mark.parametrize("world", (2, 3), ids="W{}".format)
@pytest.mark.parametrize("name", ("cycle", "purpose", "tokens", "dtype", "table"))
def test_swapped_collectives_detected(results, world, name):
    """Two exchanges of the same sizes, the other way round on the last rank: every rank says so, with both values."""
    for rank, found in enumerate(results.ranks("swapped", world)):
        assert found["same"] is None
        assert re.search(rf"row plans of ranks {world - 1 if rank < world - 1 else 0} and {rank}\n", found[name])
        values = [re.search(rf"  {line}: +{{'{name}': (.+)}}", found[name])[1] for line in ("found", "expected")]
        assert values[0] != values[1]


@pytest.mark.parametrize("world", (2, 3), ids="W{}".format)
@pytest.mark.parametrize("name", list(cases.BAD))
def test_bad_ids_rejected(results, world, name):
    *others, last = [found[name] for found in results.ranks("bad_ids", world)]
    assert others == [None] * (world - 1)
    assert last is None if name == "sound" else "rows of table that rank 0 asks for" in last


# ---- Executors ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("world", (1, 2, 3, SLOW), ids="W{}".format)
@modes
def test_split(results, world, mode):
    """Moments of the head become moments of rows; before, at and after the split all bits are those of one rank."""
    alone, = results.ranks("split", 1)
    ranks = results.ranks("split", world)
    for step in (SPLIT_STEP, MODEL_STEPS - 1):
        want, got = alone[mode, step], [found[mode, step] for found in ranks]
        for label in ROW_LABELS:
            np.testing.assert_array_equal(got[0][label], want[label], f"{label} after step {step}")
            for name in "mv":
                parts = [x[f"{label}.{name}"] for x in got]
                whole = (np.concatenate(parts) if label == "lm_head" else
                         rows_reference.whole(parts, len(want[label])))
                np.testing.assert_array_equal(whole, want[f"{label}.{name}"], f"{label}.{name} after step {step}")
    same, later = alone[mode, SPLIT_STEP], alone[mode, MODEL_STEPS - 1]
    for ending in ("", ".m", ".v"):
        np.testing.assert_array_equal(same[f"embed{ending}"], same[f"lm_head{ending}"].T)
        assert same[f"embed{ending}"].any() and not np.array_equal(later[f"embed{ending}"], later[f"lm_head{ending}"].T)
    assert {found[mode, "counts"]["embed"] for found in ranks} == {MODEL_STEPS // 2}


@pytest.mark.parametrize("world, mode", [*itertools.product((1, 2), MODES),
                                         pytest.param(SLOW_WORLD, "sparse", marks=pytest.mark.all)])
def test_eval_between_cycles(results, world, mode):
    """Looks at starts and in middles of cycles change no bit, and see what one rank sees."""
    alone, = results.ranks("evaluation", 1)
    for found in results.ranks("evaluation", world):
        without, looked = found[mode, 0], found[mode, 4]
        assert without.keys() == looked.keys()
        for key in without.keys() - {"seen", "traffic"}:
            assert without[key].tobytes() == looked[key].tobytes(), key
        assert without["traffic"] == looked["traffic"]
        assert len(looked["seen"]) == 8
        np.testing.assert_allclose(looked["seen"], alone["dense", 4]["seen"], rtol=1e-10)
        for label in ROW_LABELS:
            if label in looked:
                np.testing.assert_allclose(looked[label], alone["dense", 4][label], rtol=1e-8, atol=1e-10)


@pytest.mark.all
@pytest.mark.parametrize("world", (2,), ids="W{}".format)
def test_compiled_executor_has_one_graph_a_stage(results, world):
    """Three cycles, with two ranks with an evaluation in each: after the first there is no new graph, and losses are
    the eager ones."""
    for found in results.ranks("compiled", world):
        eager, compiled = found[0], found[1]
        assert eager["graphs"] == [0] * 6 and compiled["graphs"][0] > 0
        assert compiled["graphs"][1:] == [compiled["graphs"][1]] * 5, "recompiled within a stage"
        assert compiled["grads"] == [[]] * 6, "autograd has a gradient of a table"
        np.testing.assert_allclose(compiled["losses"], eager["losses"], rtol=1e-9)


# ---- add_rows -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sums_type", (torch.float32, torch.float64))
@pytest.mark.parametrize("grad_type", (torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("shape, width", [((0,), 3), ((1,), 1), ((7, 5), 24), ((3, 2, 50), 16)])
def test_add_rows(sums_type, grad_type, shape, width):
    """Against float64 np.add.at; twice, for equal bits. What the sums held is added to, rows that are not read stay."""
    rng = np.random.default_rng(0)
    index = rng.integers(0, 9, shape)
    if index.size > 2:
        index.reshape(-1)[:3] = 0, 11, 11
    grad, before = torch.from_numpy(rng.normal(size=(*shape, width))).to(grad_type), rng.normal(size=(12, width))
    before[10] = np.nan                                                       # not read: neither lost nor passed on
    want = torch.from_numpy(before).to(sums_type).double().numpy()
    np.add.at(want, index.reshape(-1), grad.double().numpy().reshape(-1, width))
    got = []
    for _ in range(2):
        got.append(torch.from_numpy(before).to(sums_type))
        assert tg.add_rows(got[-1], torch.from_numpy(index).int(), grad) is None
    exact = sums_type == torch.float64
    np.testing.assert_allclose(got[0].numpy(), want, rtol=1e-12 if exact else 2e-5, atol=1e-12 if exact else 2e-5)
    assert got[0].numpy().tobytes() == got[1].numpy().tobytes()
    still = sorted({*range(12)} - {*index.reshape(-1).tolist()})
    np.testing.assert_array_equal(got[0][still], torch.from_numpy(before[still]).to(sums_type))
    assert got[0].isnan().any(dim=1).nonzero().tolist() == [[10]]


def test_add_rows_behind_2_to_31():
    """On a buffer of which the system keeps the pages that were written, and no more."""
    rows = 2**31 // 24 + 3
    sums, touched = torch.empty(rows, 24), torch.tensor([0, rows - 2, rows - 1])
    assert sums.numel() > 2**31
    sums[touched] = 1.0
    tg.add_rows(sums, touched[[2, 0, 1, 2, 2]].int(), torch.arange(5.0)[:, None].expand(5, 24))
    assert sums[touched].unique(dim=1).flatten().tolist() == [2.0, 3.0, 8.0]


def test_add_rows_is_an_operator_that_says_what_it_changes():
    sums, index, grad = cases.lines_of_rows(5)
    sums.nan_to_num_()
    torch.library.opcheck(torch.ops.train_gpt.add_rows.default, (sums, index, grad))
    assert torch.ops.train_gpt.add_rows.default._schema.is_mutable


@needs_triton
def test_add_rows_triton_body_interpreted(tmp_path):
    """11 lines of a row in blocks of 4, the first and the last row, widths that fill no block, 2^31 elements."""
    start(tmp_path, "interpret", TRITON_INTERPRET="1")
    found = json.loads((tmp_path / "interpret.json").read_text())
    assert found["small"] == found["bf16"] == {width: [0.0, int(width)] for width in ("1", "5", "16", "24")}
    assert found["large"] == [2.0, 3.0, 8.0]


@needs_triton
def test_add_rows_triton_body_compiles_without_a_gpu(tmp_path):
    """For compute capabilities 80 and 90, with 64-bit addresses: the row is widened before it is multiplied."""
    start(tmp_path, "compile", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    found = json.loads((tmp_path / "compile.json").read_text())
    assert {key.split()[0] for key in found} == {"80", "90"}
    for key, made in found.items():
        assert f".target sm_{key[:2]}" in made["ptx"] and made["cubin"] > 0
        wide = re.search(r"(%\w+) = arith.extsi (%row\w*) : i32 to i64", made["ttir"])
        assert wide and re.search(rf"arith.muli .*{wide[1]}\b.* : i64", made["ttir"]), made["ttir"]
        assert not re.search(r"arith.muli .* : (tensor<.*xi32|i32)", made["ttir"]), "a product in 32 bits"


# ---- Lookups under torch.compile ------------------------------------------------------------------------------------

def test_row_lookup_compiled():
    """Two micro-batches into the same sums; other indices and another cycle's buffers make no new graph."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()

    def loss(source, index, sums, weight):
        return (tg.RowLookup.apply(source, index, sums) * weight).sin().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)
    rng = np.random.default_rng(1)
    for cycle in range(3):
        source = torch.from_numpy(rng.normal(size=(9, 4))).requires_grad_()
        sums, want = torch.zeros(9, 4, dtype=torch.float64), source.detach().clone().requires_grad_()
        for _ in range(2):
            index = torch.from_numpy(rng.integers(0, 9, (2, 6))).int()
            weight = torch.from_numpy(rng.normal(size=(2, 6, 4))).requires_grad_()
            got = compiled(source, index, sums, weight)
            got.backward()
            seen, weight.grad = weight.grad, None
            plain = (torch.nn.functional.embedding(index, want) * weight).sin().sum()
            plain.backward()
            np.testing.assert_allclose(seen, weight.grad, rtol=1e-12)
            assert float(got.detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
        np.testing.assert_allclose(sums, want.grad, rtol=1e-12, atol=1e-12)
        assert source.grad is None
        assert counters["stats"]["unique_graphs"] == 1, f"recompiled in cycle {cycle}"
    assert not counters["graph_break"]


def test_row_lookup_without_a_gradient_of_the_rows():
    """A constant source, and sums that are None: for readers that do not train."""
    index = torch.tensor([[3, 1]], dtype=torch.int32)
    source = torch.arange(8.0).view(4, 2)
    with torch.no_grad():
        assert tg.RowLookup.apply(source.requires_grad_(), index, None).tolist() == [[[6.0, 7.0], [2.0, 3.0]]]


# ---- Small things ---------------------------------------------------------------------------------------------------

def test_empty_lists_of_rows_in_a_plan():
    """Neither way to find the rows of a cycle minds that there are none."""
    cfg = cases.small_config()
    for world in (1, 2):
        plan, (index,) = tg.Planner(cfg, fabric(0, world)).plan(
            "bigram_embed", dict(purpose="train", cycle=0, tokens=0), False, [np.zeros((0, 4), np.int32)])
        assert (len(plan.rows_i_read), plan.counts_by_owner, index.shape) == (0, [0] * world, (0, 4))


@pytest.mark.parametrize("count", (3, 4000))
def test_rows_of_a_cycle_by_bitmap_and_by_sorting(count):
    """Few reads of a large table are sorted, many are found with a bitmap: the same plan."""
    cfg, rng = cases.small_config(bigram_rows=4001), np.random.default_rng(0)
    assert 4001 > tg.BITMAP_ROWS * 2 * 3 and 4001 < tg.BITMAP_ROWS * 2 * 4000
    planner = tg.Planner(cfg, fabric(1, 3))
    for _ in range(2):                                                        # the second finds a clean bitmap
        read = [rng.integers(0, 4001, (1, count)).astype(np.int32) for _ in range(2)]
        plan, index = planner.plan("bigram_embed", dict(purpose="train", cycle=0, tokens=count), False, read)
        want = sorted({rows_reference.physical(int(row), 3, 4001) for x in read for row in x.ravel()})
        assert plan.rows_i_read.tolist() == want and plan.size == 1334
        for x, at in zip(read, index):
            assert at.shape == x.shape and at.dtype == np.int32
            want = [rows_reference.physical(int(row), 3, 4001) for row in x.ravel()]
            assert plan.rows_i_read[at.ravel()].tolist() == want


@pytest.mark.parametrize("world", range(1, 9))
def test_ids_to_2_to_31_minus_2_at_any_number_of_ranks(world):
    """Where the last slices are not full, physical rows lie behind 2^31."""
    rows = 2**31 - 1
    planner = tg.Planner(cases.small_config(trigram_rows=rows), fabric(0, world))
    size = planner.sizes["trigram_embed"]
    logical = np.array([5, 0, rows - 1, *range(rows - 9, rows), 5], np.int32)
    plan, (places,) = planner.plan("trigram_embed", dict(purpose="test"), False, [logical])
    physical = logical.astype(np.int64) % world * size + logical // world
    np.testing.assert_array_equal(plan.rows_i_read, np.unique(physical))
    np.testing.assert_array_equal(plan.rows_i_read[places], physical)

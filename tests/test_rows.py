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
from common import fabric, plan_of, planner_of
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

        def compare(name: str, x: np.ndarray, want: np.ndarray) -> None:
            if x.dtype != want.dtype or not np.array_equal(x, want):
                wrong.append(f"{pattern} of {rows}: {name}")

        for cycle, (seen, before) in enumerate(zip(got["cycles"], tables)):
            physical = np.concatenate(rows_reference.cut(before, world))      # with zeros where there is no row
            compare(f"rows fetched in cycle {cycle}", seen["fetched"], physical[seen["my_rows"]])
            for step, read in enumerate(rows_of(rank, world, run, k, cycle)):
                compare(f"rows read in cycle {cycle}", seen["read"][step], before[read])
        for name, want in (("shard", tables[-1]), ("m", m), ("v", v)):
            compare(name, got[name], rows_reference.cut(want, world)[rank])
    return wrong


@worlds
def test_rows_bitwise_dense(results, world):
    ranks = results.ranks("exchange", world)
    for number, run in enumerate(cases.all_runs(world)):
        for rank, found in enumerate(ranks):
            assert differences(found[number], rank, world, run) == [], f"{run} on rank {rank}"


def reference_plan(run: cases.Run, table: int, cycle: int, world: int) -> tuple[list, list, list]:
    """By rank: its list, how many rows of each owner are in it, what readers request of it. Dense: all rows."""
    _, rows = run.tables[table]
    read = [np.concatenate(rows_of(rank, world, run, table, cycle)) for rank in range(world)]
    lists, pieces = rows_reference.plan(read, rows)
    if run.mode == "dense" and world > 1:
        size = -(-rows // world)
        lists = [list(range(world * size))] * world
        pieces = [[list(range(size))] * world] * world
    return lists, [list(map(len, of_rank)) for of_rank in pieces], rows_reference.exchange(pieces)


def test_runs_cover_what_they_should():
    """Every pattern in every mode, with 1, 2 and 4 parts of a step and fewer rows than ranks, at every W; every type,
    too, in sparse mode. Nothing of some owner, nothing by some rank, nothing at all: these occur as well."""
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
        sparse = [run for run in runs if run.mode == "sparse"]
        counts = [np.array(reference_plan(run, k, cycle, world)[1])
                  for run in sparse for k in range(len(run.tables)) for cycle in range(run.cycles)]
        assert any(not x.any() for x in counts)
        if world > 1:
            assert any(x.any() and not x.any(0).all() for x in counts)
            assert any(x.any() and not x.any(1).all() for x in counts)
            assert any(x.any(0).all() and x.any(1).all() and not x.all() for x in counts)


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
        for (k, (_, rows)), cycle in itertools.product(enumerate(run.tables), range(run.cycles)):
            lists, counts, requests = reference_plan(run, k, cycle, world)
            for rank in range(world):
                seen = ranks[rank][number][k]["cycles"][cycle]
                assert seen["my_rows"].tolist() == lists[rank] and seen["my_rows"].dtype == np.int64
                assert seen["send_counts"] == counts[rank]
                assert seen["requested_rows"].tolist() == list(itertools.chain(*requests[rank]))
                assert seen["recv_counts"] == list(map(len, requests[rank]))
                index = np.concatenate(seen["index"])
                found = seen["my_rows"][index] if world > 1 else index
                read = np.concatenate(rows_of(rank, world, run, k, cycle)).tolist()
                assert found.tolist() == [rows_reference.physical(row, world, rows) for row in read]


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
                shards = [found[number][k]["shard"] for found in results.ranks("exchange", world)]
                got = rows_reference.whole(shards, rows)
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
        assert len(poisoned) == (world > 1) * len(run.tables) * run.cycles and all(poisoned)
        if mode == "sparse" or world == 1:                                    # else a plan has every row
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
def test_owners_add_in_the_order_of_ranks(results, world):
    """Numbers whose sum depends on the order: rank 0 first, the owner's own at its place."""
    def total(ranks: range) -> np.ndarray:
        return functools.reduce(np.add, [cases.addends(rank).numpy() for rank in ranks])

    got = rows_reference.whole(results.ranks("rank_order", world), 20)
    np.testing.assert_array_equal(got, total(range(world)))
    assert not np.array_equal(got, total(range(world)[::-1])), "this test cannot tell"


# ---- Bytes ----------------------------------------------------------------------------------------------------------

@worlds
def test_bytes_formula(results, world):
    """Accounts of tables and cycles against the formulas of the exchange, and against what collectives were given."""
    ranks = results.ranks("exchange", world)
    for number, run in enumerate(cases.all_runs(world)):
        for rank in range(world):
            row_bytes, sums = ELEMENT[run.dtype] * WIDTH, dict(bytes_sent=0, bytes_received=0)
            for k, (_, rows) in enumerate(run.tables):
                accounts, size = ranks[rank][number][k]["accounts"], -(-rows // world)
                assert len(accounts) == run.cycles
                for cycle, (account, seen) in enumerate(zip(accounts, ranks[rank][number][k]["cycles"])):
                    requested, asked = (sum(seen[name]) - seen[name][rank] for name in ("send_counts", "recv_counts"))
                    # The list goes out, its rows come in, their gradients go out; and the same for the others' lists.
                    sent = (4 + row_bytes) * requested + row_bytes * asked
                    received = (4 + row_bytes) * asked + row_bytes * requested
                    assert account.pop("plan_ms") >= 0
                    assert account == dict(
                        purpose="train", cycle=cycle, tokens=SLOTS, table=f"table {k}", mode=run.mode,
                        rows=len(seen["my_rows"]), reads=sum(map(len, seen["index"])), bytes_sent=sent,
                        bytes_received=received, bytes_dense=2 * (world - 1) * size * row_bytes)
                    sums = {key: sums[key] + account[key] for key in sums}
            assert ranks[rank][number][0]["seen"] == dict(sent=sums["bytes_sent"], received=sums["bytes_received"])


# ---- Ranks that disagree, lists that are wrong ----------------------------------------------------------------------

@pytest.mark.parametrize("world", (2, 3), ids="W{}".format)
@pytest.mark.parametrize("name", ("cycle", "purpose", "tokens", "dtype", "table"))
def test_exchange_plans__ranks_swap_two_exchanges(results, world, name):
    """Of the same sizes, the other way round on the last rank: every rank says so, with both values."""
    for rank, found in enumerate(results.ranks("swapped", world)):
        assert found["same"] is None
        assert re.search(rf"row plans of ranks {world - 1 if rank < world - 1 else 0} and {rank}\n", found[name])
        values = [re.search(rf"  {line}: .*?'{name}': ([^,}}]+)", found[name])[1] for line in ("found", "expected")]
        assert values[0] != values[1]


@pytest.mark.parametrize("world", (2, 3), ids="W{}".format)
@pytest.mark.parametrize("name", list(cases.BAD))
def test_exchange_plans__a_list_that_no_plan_can_hold(results, world, name):
    *others, last = [found[name] for found in results.ranks("bad_ids", world)]
    assert others == [None] * (world - 1)
    assert last is None if name == "sound" else "rows of table that rank 0 requests" in last


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

def test_add_rows__beyond_2_to_31():
    """On a buffer of which the system keeps the pages that were written, and no more."""
    rows = 2**31 // 24 + 3
    sums, touched = torch.empty(rows, 24), torch.tensor([0, rows - 2, rows - 1])
    assert sums.numel() > 2**31
    sums[touched] = 1.0
    tg.add_rows(sums, touched[[2, 0, 1, 2, 2]].int(), torch.arange(5.0)[:, None].expand(5, 24))
    assert sums[touched].unique(dim=1).flatten().tolist() == [2.0, 3.0, 8.0]


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


# ---- Plans by hand --------------------------------------------------------------------------------------------------

def test_plan__no_rows_at_all():
    table = tg.Table("a", 20, 1, None)
    for world in (1, 2):
        plan, (index,) = plan_of(planner_of(tg.Config(), fabric(0, world), table), table, [np.zeros((0, 4), np.int32)])
        assert (len(plan.my_rows), plan.send_counts, index.shape) == (0, [0] * world, (0, 4))

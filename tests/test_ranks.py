"""1, 2, 4 and 8 ranks compute the same run; what travels between them, who updates what, and that nothing else does.

rank_cases.py is started once and runs every case in real processes over gloo; here its files are compared, mostly with
those of one process, whose numbers are the other tests' business. A sum over ranks has another order than over slots:
float64 runs differ by rounding, 1e-14 of a loss as measured. Where all numbers are integers, all bits are equal.
"""
from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import Run, losses, weights

import train_gpt as tg

SLOW_4, SLOW_8 = (pytest.param(world, marks=pytest.mark.all) for world in (4, 8))
WORLDS = (2, SLOW_4, 8)
BANKS = ("attn", "mlp")
TABLES = ("bigram_embed", "value_embed", "embed")
SHARDED = (*BANKS, *TABLES, "lm_head")
REPLICATED = ("scalars", "x0_lambdas", "smear_gate", "skip_gate", "attn_gate_bank", "ve_gate_bank")
LABELS = {*SHARDED, *REPLICATED}
VOCABULARY, DOCUMENT_START = 512, 511

Arrays = dict[str, np.ndarray]
worlds = pytest.mark.parametrize("world", WORLDS, ids="W{}".format)
few_worlds = pytest.mark.parametrize("world", (2, SLOW_4, SLOW_8), ids="W{}".format)
one_and_few_worlds = pytest.mark.parametrize("world", (1, 2, SLOW_4, SLOW_8), ids="W{}".format)
odd_worlds = pytest.mark.parametrize("world", [*WORLDS, pytest.param(3, marks=pytest.mark.all)], ids="W{}".format)

runs = pytest.mark.parametrize("case, world", [
    ("run_12", 2), ("run_12", 8), ("run_13", 2), ("run_single", 2), ("run_every", 2),
    *(pytest.param(*case, marks=pytest.mark.all) for case in (
        ("run_12", 4), ("run_13", 4), ("run_13", 8), ("run_single", 4), ("run_single", 8), ("run_every", 4),
        ("run_every", 8)))])


@dataclass
class Results:
    """Files of rank_cases.py."""
    folder: Path

    def _files(self, case: str, world: int, ending: str) -> list[Path]:
        """One of each rank. Fails with what the ranks said if one has none."""
        place = self.folder / f"w{world}"
        files = [place / f"{case}.{rank}.{ending}" for rank in range(world)]
        if not all(path.exists() for path in files):
            errors = sorted(place.glob(f"{case}.*.error"), key=lambda path: path.stat().st_mtime)
            errors += [path for path in place.glob("stuck.*") if path.stat().st_size]
            silent = [rank for rank, path in enumerate(files) if not path.with_suffix(".error").exists()]
            pytest.fail("\n".join([f"{case} with {world} ranks: nothing from {silent}, and"] +
                                  [f"{path.name}:\n{path.read_text()}" for path in errors]), pytrace=False)
        return files

    def arrays(self, case: str, world: int) -> list[Arrays]:
        """By rank."""
        found = []
        for path in self._files(case, world, "npz"):
            with np.load(path) as arrays:
                found.append(dict(arrays))
        return found

    def facts(self, case: str, world: int) -> list[dict[str, Any]]:
        """By rank."""
        return [json.loads(path.read_text()) for path in self._files(case, world, "json")]

    def state(self, case: str, world: int, parts: str = "part") -> Arrays:
        """Moments of all ranks, those of sharded parameters put together: PARTS.LABEL.NAME."""
        ranks, found = self.arrays(case, world), {}
        for key in ranks[0]:
            if key.startswith(f"{parts}."):
                label = key.split(".")[-2]
                found[key] = ranks[0][key]
                if label in TABLES:
                    found[key] = of_owners([rank[key] for rank in ranks], len(ranks[0][f"weight.{label}"]))
                elif label in SHARDED:
                    found[key] = np.concatenate([rank[key] for rank in ranks])
        return found

    def weights(self, case: str, world: int) -> Arrays:
        """Of rank 0."""
        return {key: x for key, x in self.arrays(case, world)[0].items() if key.startswith("weight.")}

    def slot_losses(self, case: str, world: int) -> np.ndarray:
        """(steps, slots): slot s is rank s mod W's, its (s div W)-th."""
        by_rank = [rank["slot_losses"] for rank in self.arrays(case, world)]
        return np.stack(by_rank, axis=2).reshape(len(by_rank[0]), -1)


def of_owners(slices: list[np.ndarray], rows: int) -> np.ndarray:
    """A table of which rank r has the rows r, r + W, r + 2W, ... and perhaps padding after them."""
    table = np.empty((rows, *slices[0].shape[1:]), slices[0].dtype)
    for rank, mine in enumerate(slices):
        assert len(mine) == -(-rows // len(slices)), "slices are of one size"
        table[rank::len(slices)] = mine[:len(range(rank, rows, len(slices)))]
    return table


def write_data(folder: Path) -> None:
    """Shards of two steps or so, since a block that does not fit starts the next one, and bytes of the tokens."""
    for name, seed, count in [(f"train_{k:02}", k, 1500) for k in range(12)] + [("val_0", 99, 1600)]:
        header = np.zeros(256, "<i4")
        header[:5] = tg.SHARD_MAGIC, tg.SHARD_VERSION, count, VOCABULARY, DOCUMENT_START
        tokens = tg.formula_tokens(seed, count, VOCABULARY, DOCUMENT_START)
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    pieces = ((base64.b64encode(b" w%d" % token), token) for token in range(VOCABULARY) if token != DOCUMENT_START)
    (folder / "vocab.txt").write_bytes(b"".join(b"%s %d\n" % piece for piece in pieces))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    write_data(folder)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "rank_cases.py"), str(folder)]
    slow = ["--all"] * request.config.getoption("--all")
    launched = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD_SIZE" not in name}
    done = subprocess.run(command + slow, env=launched | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    return Results(folder)


def assert_same_bits(got: Arrays, want: Arrays) -> None:
    assert got.keys() == want.keys()
    assert [key for key in want if got[key].dtype != want[key].dtype or not np.array_equal(got[key], want[key])] == []


def assert_close(got: Arrays, want: Arrays, limit: float) -> None:
    """Norm of the difference over the norm."""
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert got[key].shape == x.shape, key
        error = np.linalg.norm(got[key] - x) / max(float(np.linalg.norm(x)), 1e-30)
        assert error <= limit, f"{key}: {error:.1e}"


# ---- Whole runs -----------------------------------------------------------------------------------------------------

def test_the_runs_have_what_makes_them_hard(results: Results) -> None:
    """A stage change inside a cycle, the untying, a validation in mid-cycle, half a last cycle, several shards."""
    for case, extension in (("run_12", 3), ("run_13", 4), ("run_single", 3)):
        schedule = tg.Schedule(tg.Config(**tg.PRESETS["tiny"] | dict(num_extension_steps=extension)))
        assert any(start % 2 for start in schedule.starts[1:])
        assert schedule.untie_step < schedule.end_step - 1
        one, = results.facts(case, 1)
        assert one["validation_steps"] == [0, 5, 10, schedule.end_step] and 5 % 2 == 1
        losses = results.slot_losses(case, 1)
        assert losses.shape == (schedule.end_step, 8) and len(np.unique(losses)) == losses.size
    assert tg.Schedule(tg.Config(**tg.PRESETS["tiny"] | dict(num_extension_steps=4))).end_step % 2 == 1
    assert 1500 < 12 * 128, "the first stage does not fit into one shard"


@runs
def test_losses_do_not_depend_on_the_number_of_ranks(case: str, world: int, results: Results) -> None:
    """Every slot at every step, and every validation, on every rank."""
    limit = 1e-3 if case == "run_single" else 1e-9
    one = results.arrays(case, 1)[0]
    np.testing.assert_allclose(results.slot_losses(case, world), results.slot_losses(case, 1), rtol=0, atol=limit)
    for rank in results.arrays(case, world):
        np.testing.assert_allclose(rank["validation_losses"], one["validation_losses"], rtol=0, atol=limit)
    found = [rank["validation_losses"].tobytes() for rank in results.arrays(case, world)]
    assert len(set(found)) == 1, "all ranks know the same number"


@runs
def test_final_weights_and_moments_do_not_depend_on_the_number_of_ranks(case: str, world: int,
                                                                        results: Results) -> None:
    """Adam divides by the gradient's own size: where that is nearly 0, rounding decides, even the sign of an entry.

    Such entries are few, so norms are compared. As measured: 1e-12 in float64, and 5e-3 in fp32, from one bigram row.
    """
    limit = 0.05 if case == "run_single" else 1e-9
    assert_close(results.weights(case, world), results.weights(case, 1), limit)
    assert_close(results.state(case, world), results.state(case, 1), limit)


@runs
def test_all_ranks_have_the_same_weights(case: str, world: int, results: Results) -> None:
    """At the start, which no rank tells another, and at the end. Of a table each rank has the rows that it owns."""
    one, alone = results.facts(case, 1)[0], results.arrays(case, 1)[0]
    ranks, arrays = results.facts(case, world), results.arrays(case, world)
    for rank in ranks:
        for label in LABELS - {*TABLES}:
            assert rank["initial"][label] == one["initial"][label], label
            assert rank["final"][label] == ranks[0]["final"][label], label
        assert not {label for label in LABELS if rank["final"][label] == rank["initial"][label]}
    for label in TABLES:
        rows = len(alone[f"initial.{label}"])
        initial, final = (of_owners([rank[f"{name}.{label}"] for rank in arrays], rows)
                          for name in ("initial", "slice"))
        np.testing.assert_array_equal(initial, alone[f"initial.{label}"])
        np.testing.assert_array_equal(final, arrays[0][f"weight.{label}"])
        assert len(arrays[0][f"slice.{label}"]) == rows // world, "no rank keeps the others' rows"


@one_and_few_worlds
def test_warm_up_leaves_no_trace_on_any_rank(world: int, results: Results) -> None:
    for rank in results.facts("run_12", world):
        assert rank["warm_up_steps"] > 4
        assert rank["left_by_warm_up"] == rank["has_gradients"] == []


@worlds
def test_rank_0_keeps_the_log_of_all(world: int, results: Results) -> None:
    """Tokens and validation losses of the whole run; where the ranks' own things stand is written down."""
    one, many = ([json.loads(line) for line in (results.folder / f"w{w}/run_12/log.jsonl").read_text().splitlines()]
                 for w in (1, world))
    own = "phase", "comms"                 # W = 8 has no warm-up here; one rank reads rows of validation where they are
    types = [[entry["type"] for entry in log if entry["type"] not in own] for log in (one, many)]
    assert types[0] == types[1]
    for kind, field in (("step", "tokens"), ("val", "val_loss"), ("val", "step"), ("result", "tokens")):
        got, want = ([entry[field] for entry in log if entry["type"] == kind] for log in (many, one))
        assert want and got == pytest.approx(want, rel=0, abs=1e-9), (kind, field)
    assert [log[0]["world_size"] for log in (one, many)] == [1, world]
    assert {path.name for path in (results.folder / f"w{world}/run_12").iterdir()} == {
        "log.txt", "log.jsonl", "settings.json", "train_gpt.py"}
    printed = [rank["printed"] for rank in results.facts("run_12", world)]
    assert printed[0] and not any(printed[1:])


# ---- Ways in which rows travel --------------------------------------------------------------------------------------

KINDS = {"13": "run_13", "single": "run_single"}
kinds_and_worlds = pytest.mark.parametrize("kind, world", [
    ("13", 2), *(pytest.param(*case, marks=pytest.mark.all) for case in (
        ("single", 2), ("13", 4), ("single", 4), ("13", 8), ("single", 8)))])


def results_of(case: str, world: int, results: Results) -> Arrays:
    """Losses of every slot and step, of every validation, and the whole weights."""
    rank = results.arrays(case, world)[0]
    return dict(slots=results.slot_losses(case, world), validations=rank["validation_losses"],
                **results.weights(case, world))


@kinds_and_worlds
def test_dense_gradients_change_rounding_only(kind: str, world: int, results: Results) -> None:
    """Owners add lists in the order of ranks, a reduction of full gradients in its own. Weights as between worlds."""
    limit = 1e-3 if kind == "single" else 1e-9
    got, want = (results_of(case, world, results) for case in (f"dense_{kind}", KINDS[kind]))
    for name in ("slots", "validations"):
        np.testing.assert_allclose(got.pop(name), want.pop(name), rtol=0, atol=limit)
    assert_close(got, want, 0.05 if kind == "single" else 1e-9)


def test_one_rank_has_one_way(results: Results) -> None:
    """There is nobody to send rows to."""
    assert_same_bits(*(results_of(case, 1, results) for case in ("dense_13", "run_13")))


@few_worlds
def test_sums_that_are_exact_give_the_same_bits_in_both_modes(world: int, results: Results) -> None:
    for got, want in zip(results.arrays("hand_dense", world), results.arrays("hand_float64", world), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.all), 2, SLOW_4), ids="W{}".format)
def test_poison_in_rows_that_were_not_fetched_is_never_read(world: int, results: Results) -> None:
    """--debug_rows fills them with what is not a number, and finds no gradient where no plan has a row."""
    assert_same_bits(*(results_of(case, world, results) for case in ("debug_13", "run_13")))


@pytest.mark.all                         # of the updates alone: test_any_order_of_communication
def test_orders_of_reductions_and_updates_change_no_bit_of_a_run(results: Results) -> None:
    assert_same_bits(*(results_of(case, 2, results) for case in ("orders_single", "run_single")))


def test_a_run_repeats_itself(results: Results) -> None:
    """Weights and every word of the log, but for the clock, the memory and the folder."""
    def told(entry: object) -> object:
        own = "run_dir", "started", "ms", "peak_memory_mib"
        if isinstance(entry, dict):
            return {key: told(x) for key, x in entry.items() if key not in own and not key.endswith("_ms")}
        return [told(x) for x in entry] if isinstance(entry, list) else entry

    one, two = ([told(json.loads(line)) for line in (results.folder / f"w2/{case}/log.jsonl").read_text().splitlines()]
                for case in ("run_single", "again_single"))
    assert one == two
    assert {"header", "step", "val", "comms", "result"} <= {entry["type"] for entry in one}
    assert_same_bits(*(results_of(case, 2, results) for case in ("again_single", "run_single")))


def test_two_ranks_resume_bitwise(results: Results) -> None:
    whole, two = (results.folder / "w2" / name for name in ("whole", "two"))
    assert [rank["statuses"] for rank in results.facts("resumed", 2)] == [[0, 0]] * 2
    assert losses(two) == losses(whole)
    assert weights(results.folder / "w2/two_saved") == weights(results.folder / "w2/whole_saved")
    assert [entry["step"] for entry in Run(two, 0, "", "").of("resumed")] == [8], "after the untying"


# ---- The oracle -----------------------------------------------------------------------------------------------------

def check_trajectory(case: str, world: int, results: Results) -> None:
    """The ranks themselves compare; an array that is off is their error."""
    ranks = results.facts(case, world)
    assert ranks[0]["compared"] > 250 and not any(rank["compared"] for rank in ranks[1:])
    assert all(rank["final"][label] == ranks[0]["final"][label] for rank in ranks for label in LABELS - {*TABLES})
    print(ranks[0]["printed"])


@pytest.mark.all                         # one rank's is in test_oracle.py
@pytest.mark.parametrize("case, world", [("trajectory", 2), ("trajectory", 4), ("trajectory", 8),
                                         ("trajectory_dense", 2)])
def test_trajectory_of_the_oracle(case: str, world: int, results: Results) -> None:
    check_trajectory(case, world, results)


@pytest.mark.all
@worlds
def test_trajectory_of_the_whole_oracle(world: int, results: Results) -> None:
    if not (results.folder / "whole").is_dir():
        pytest.skip("no ORACLE_DIR")
    check_trajectory("whole_trajectory", world, results)


# ---- Who owns what --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("world, mlp, attn", [
    (1, [22], [40]), (2, [11] * 2, [20] * 2), pytest.param(4, [6, 6, 6, 4], [10] * 4, marks=pytest.mark.all),
    (8, [3] * 7 + [1], [5] * 8)], ids=["W1", "W2", "W4", "W8"])
def test_banks_are_padded_for_the_communication_only(world: int, mlp: list, attn: list, results: Results) -> None:
    """22 MLP matrices fit no world of 4 or 8: no weight and no moment has another size for that."""
    ranks = results.arrays("run_12", world)
    for name in ("momentum", "second"):
        assert [len(rank[f"part.mlp.{name}"]) for rank in ranks] == mlp
        assert [len(rank[f"part.attn.{name}"]) for rank in ranks] == attn
    assert ranks[0]["weight.mlp"].shape == (11, 2, 128, 32)
    assert ranks[0]["weight.attn"].shape == (10, 128, 32)


@odd_worlds
def test_every_unit_has_one_owner(world: int, results: Results) -> None:
    """A model of which hardly anything divides: the last ranks own fewer units, or none."""
    ranks = results.facts("hand_float64", world)
    arrays = results.arrays("hand_float64", world)
    for label, units in ranks[0]["units"].items():
        owned, most = [rank["owned"][label] for rank in ranks], -(-units // world)
        assert owned == [min(most, max(0, units - most * rank)) for rank in range(world)]
        for name in ("momentum", "second", "mantissa") if label in BANKS else ("m", "v"):
            if f"part.{label}.{name}" in arrays[0]:
                assert [len(rank[f"part.{label}.{name}"]) for rank in arrays] == owned
    assert world < 4 or ranks[-1]["owned"]["mlp"] == 0, "the case of a rank without a matrix"


@odd_worlds
def test_every_row_has_one_owner(world: int, results: Results) -> None:
    """Slices are of one size, and what fills them up is never trained. With 8 ranks the last one has no row of 7."""
    ranks, arrays = results.facts("hand_float64", world), results.arrays("hand_float64", world)
    for label, rows in dict(bigram_embed=7, value_embed=1026, embed=513).items():
        assert [rank["owned"][label] for rank in ranks] == [-(-rows // world)] * world
        table = of_owners([rank[f"slice.{label}"] for rank in arrays], rows)
        np.testing.assert_array_equal(table, arrays[0][f"weight.{label}"])
        for rank, mine in enumerate(arrays):
            real = len(range(rank, rows, world))
            assert not any(mine[f"part.{label}.{name}"][real:].any() for name in ("m", "v"))
            assert not mine[f"slice.{label}"][real:].any()
            assert all(mine[f"part.{label}.v"][:real].any(axis=1)), "every row has had a gradient"


@odd_worlds
def test_padding_comes_nowhere(world: int, results: Results) -> None:
    """Filled with NaN instead of zeros, it changes no bit."""
    assert world == 2 or all(rank["spoilt"] for rank in results.facts("padding", world)), "2 divides the matrices"
    for got, want in zip(results.arrays("padding", world), results.arrays("hand_float64", world), strict=True):
        assert got.keys() == {key for key in want if not key.startswith("untied.")}
        for key, x in got.items():
            if key.split(".")[1] in TABLES:                                   # may hold such places, at its end
                x = x[np.isfinite(x).all(axis=1)]
                assert len(want[key]) - len(x) <= 1, key
            assert np.isfinite(x).all(), key
            np.testing.assert_array_equal(x, want[key][:len(x)])


# ---- Updates --------------------------------------------------------------------------------------------------------

@odd_worlds
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.all), "bfloat16"])
def test_sums_that_are_exact_give_the_same_bits_at_every_world(dtype: str, world: int, results: Results) -> None:
    """Six steps, tied and untied, with integers for gradients; 24 slots, of which 1/24 is no binary number."""
    case = f"hand_{dtype}"
    want = results.arrays(case, 1)[0]
    assert_same_bits(results.weights(case, world), results.weights(case, 1))
    for rank in results.arrays(case, world):
        here = {key: x for key, x in rank.items() if key.startswith("weight.")}
        assert {f"weight.{label}" for label in LABELS - {*TABLES}} <= here.keys()
        assert_same_bits(here, {key: want[key] for key in here})
    assert_same_bits(results.state(case, world), results.state(case, 1))
    assert all(np.abs(x).max() > 0 for key, x in want.items()), "everything has moved"
    assert (dtype == "bfloat16") == ("part.mlp.mantissa" in want)


@odd_worlds
def test_the_untying_deals_the_heads_moments_again(world: int, results: Results) -> None:
    """The head's are cut along D, the embedding's along V; together they are the head's, transposed, as on one rank."""
    untied, one = (results.state("hand_float64", w, parts="untied.part") for w in (world, 1))
    assert_same_bits(untied, one)
    for name in ("m", "v"):
        assert untied[f"untied.part.lm_head.{name}"].shape == (16, 513)
        np.testing.assert_array_equal(untied[f"untied.part.embed.{name}"], one[f"untied.part.lm_head.{name}"].T)


def check_orders(case: str, world: int, count: int, results: Results) -> None:
    """Of each rank's every bit, under the trainer's orders, their reverse and random ones."""
    for rank in results.facts(case, world):
        assert len(rank) == count
        for number, hashes in rank.items():
            assert hashes == rank["0"], f"order {number}: {[x for x in hashes if hashes[x] != rank['0'][x]]}"


def test_any_order_of_communication_gives_the_same_bits(results: Results) -> None:
    check_orders("orders", 2, 5, results)


@pytest.mark.all
@pytest.mark.parametrize("world", (2, 3, 4, 8), ids="W{}".format)
def test_many_orders_of_communication(world: int, results: Results) -> None:
    check_orders("many_orders", world, 40, results)


def check_counts(case: str, world: int, results: Results) -> None:
    ranks, owned = results.facts(case, world), results.facts("hand_float64", world)
    for step in range(6):
        tied = step <= 3
        planned = {*BANKS} if step % 2 == 0 else LABELS
        units = [[label] for label in planned - {*REPLICATED} - ({"lm_head", "embed"} if tied else set())]
        units += [["lm_head", "embed"]] * (tied and step % 2 == 1)            # one parameter, so one gradient
        units += [[*REPLICATED]] * (step % 2 == 1)                            # all of them in one message
        updated = {label for label in planned if not (tied and label == "embed")}
        for rank, mine in zip(ranks, owned):
            assert sorted(map(sorted, rank["reduced"][step])) == sorted(map(sorted, units)), step
            after = sorted(rank["after"][step])
            gathers = ["all_gather_into_tensor"] * len(updated & {*BANKS, "lm_head"})
            moments = ["all_to_all_single"] * (2 * (step == 3))               # of the head, for the embedding
            assert after == gathers + moments
            assert len(after) + len(units) == len(rank["sent"][step]), "nothing else travels"
            assert rank["sent"][step] == ranks[0]["sent"][step], "in one order on all ranks"
            done = rank["updated"][step]
            assert len(done) == len(set(done))
            assert {label for label in updated if mine["owned"].get(label, 1)} <= set(done) <= updated
            assert sorted(rank["cleared"][step]) == sorted(planned)
            assert sorted(rank["kept"][step]) == sorted(LABELS - planned)


@odd_worlds
def test_each_step_reduces_updates_and_gathers_once(world: int, results: Results) -> None:
    """Banks at every step, the rest once a cycle; what a step does not update keeps its gradient bit for bit.

    Gradients of rows go to their owners only; rows come back when there is a next cycle to read them.
    """
    check_counts("counting", world, results)


def test_each_step_reduces_updates_and_gathers_once_with_dense_gradients(results: Results) -> None:
    check_counts("counting_dense", 2, results)


# ---- Pieces of a step -----------------------------------------------------------------------------------------------

@one_and_few_worlds
def test_calls_add_up_and_wait_for_nobody(world: int, results: Results) -> None:
    """Odd ranks cut their slots into calls, last slot first; even ones make one call. No rank waits in a call."""
    for rank, facts in zip(results.arrays("pieces", world), results.facts("pieces", world)):
        assert facts["calls"] == [], "forward_backward talks to no other rank"
        whole, cut = ({key.partition(".")[2]: x for key, x in rank.items() if key.startswith(f"{way}.")}
                      for way in ("whole", "cut"))
        assert_close(cut, whole, 1e-9)


@one_and_few_worlds
def test_a_weight_of_zero_joins_nothing_and_changes_nothing(world: int, results: Results) -> None:
    """Odd ranks make such calls, even ones do not."""
    for rank in results.arrays("pieces", world):
        whole, extra = ({key.partition(".")[2]: x for key, x in rank.items() if key.startswith(f"{way}.")}
                        for way in ("whole", "extra"))
        assert_same_bits(extra, whole)


@few_worlds
def test_pieces_do_not_depend_on_the_number_of_ranks(world: int, results: Results) -> None:
    """A cycle from weights of which none is 0."""
    one, many = (results.arrays("pieces", w)[0] for w in (1, world))
    weights = [key for key in one if key.startswith("whole.weight.")]
    assert len(weights) == len(LABELS)
    assert_close({key: many[key] for key in weights}, {key: one[key] for key in weights}, 1e-9)


@pytest.mark.parametrize("mix", ("last rank", "in turn"))
def test_a_rank_whose_calls_weigh_nothing_joins_with_zeros(mix: str, results: Results) -> None:
    """It neither stops nor keeps the others waiting, and the update is that of a zero gradient, bit for bit."""
    for rank in results.arrays("weight_of_zero", 2):
        weight, hand = ({key.rpartition("/")[2]: x for key, x in rank.items() if key.startswith(f"{mix}/{way}/")}
                        for way in ("weight", "hand"))
        assert len(hand) > 20
        assert_same_bits(weight, hand)


def test_a_step_without_gradients_ends_on_every_rank(results: Results) -> None:
    for rank in results.facts("nothing_to_add", 2):
        assert "no gradient of" in rank["error"] and "attn" in rank["error"]


# ---- Saved weights --------------------------------------------------------------------------------------------------

def saved(results: Results, world: int) -> Path:
    assert results.facts("run_12", world)
    return results.folder / f"w{world}/saved"


@worlds
def test_saved_files_do_not_depend_on_the_number_of_ranks(world: int, results: Results) -> None:
    one, many = saved(results, 1), saved(results, world)
    assert sorted(path.name for path in many.iterdir()) == sorted(path.name for path in one.iterdir())
    assert (many / "vocab.txt").read_bytes() == (one / "vocab.txt").read_bytes()
    settings = [json.loads((folder / "settings.json").read_text()) for folder in (one, many)]
    for text in settings:
        for own in ("run_dir", "save"):
            del text["flags"][own]
    assert settings[0] == settings[1]
    want, got = (torch.load(folder / "weights.pt") for folder in (one, many))
    assert list(got) == list(want) and set(got) == LABELS
    assert [x.dtype for x in got.values()] == [x.dtype for x in want.values()]
    assert_close({label: x.numpy() for label, x in got.items()}, {label: x.numpy() for label, x in want.items()}, 1e-9)


@pytest.mark.parametrize("world", (1, *WORLDS), ids="W{}".format)
def test_saved_weights_are_the_runs(world: int, results: Results) -> None:
    """Bit for bit, in logical shapes, with the sizes that the run used."""
    tensors = torch.load(saved(results, world) / "weights.pt")
    assert_same_bits({f"weight.{label}": x.numpy() for label, x in tensors.items()}, results.weights("run_12", world))
    cfg = tg.make_config(*tg.read_settings(saved(results, world)))
    assert {row.label: row.shape for row in tg.parameter_table(cfg)} == {
        label: tuple(x.shape) for label, x in tensors.items()}
    assert (cfg.vocab_size, cfg.document_start, cfg.dtype) == (VOCABULARY, DOCUMENT_START, "float64")


# ---- Agreement ------------------------------------------------------------------------------------------------------

def check_disagreement(message: str | None, name: str, first: str, other: str, rank: int) -> None:
    """Found, expected, do; the field, both values, and the rank."""
    assert message is not None, "no error on this rank"
    what, found, expected, do = message.split("\n")
    assert what.endswith(f"disagree about {name}"), message
    assert found.strip().startswith("found:") and expected.strip().startswith("expected:"), message
    assert all(part in found for part in (first, other, f"rank {rank}", "rank 0")) and "same flags" in do, message


@worlds
def test_ranks_that_disagree_all_say_so(world: int, results: Results) -> None:
    for rank in results.facts("agreement", world):
        assert rank["errors"]["same"] is None
        check_disagreement(rank["errors"]["last"], "data_sha256", "d1", "d2", world - 1)
        check_disagreement(rank["errors"]["first"], "--seed", "7", "1", 1)
        check_disagreement(rank["errors"]["missing"], "torch", "2", "None", world - 1)


def test_one_rank_agrees_with_itself(results: Results) -> None:
    rank, = results.facts("agreement", 1)
    assert rank["errors"]["same"] is None and rank["lowest"] == [5, 5, 0, 2**40]


@worlds
def test_the_lowest_of_all_ranks(world: int, results: Results) -> None:
    for rank in results.facts("agreement", world):
        assert rank["lowest"] == [5 - (world - 1), 5, -(world - 1), 2**40]


@worlds
def test_a_run_with_other_flags_on_one_rank_ends_before_it_starts(world: int, results: Results) -> None:
    """On every rank with status 2. That only one speaks is for a launcher's store to arrange, which is not here."""
    ranks = results.facts("other_flags", world)
    assert [rank["status"] for rank in ranks] == [2] * world
    for rank in ranks:
        check_disagreement(rank["errors"].rstrip(), "--adam_lr", "0.008", "0.009", world - 1)
    assert not (results.folder / f"w{world}/other_flags").exists(), "no log of a run that never was"


@pytest.mark.parametrize("world", (2, SLOW_4), ids="W{}".format)
def test_ranks_whose_plans_disagree_all_say_so(world: int, results: Results) -> None:
    """Before anything has changed. Each names itself, the first that differs, and what both of them have."""
    for number, rank in enumerate(results.facts("plan_agreement", world)):
        errors = rank["errors"]
        assert errors.pop("same") is None and errors.pop("again") is None and rank["changed"] == []
        for name, (at, key, own, common) in dict(
                cycle=(world - 1, "cycle", 5, 4), first=(0, "cycle", 3, 4), tokens=(world - 1, "tokens", 65, 64),
                purpose=(world - 1, "purpose", None, None), dtype=(world - 1, "dtype", None, None)).items():
            text = errors.pop(name)
            assert text is not None, f"{name}: no error on rank {number}"
            what, found, expected, do = text.split("\n")
            other = at if number != at else int(at == 0)
            assert what == f"row plans of ranks {other} and {number}" and "same flags" in do, text
            assert found.strip().startswith("found:") and expected.strip().startswith("expected:"), text
            if own is not None:
                values = (own, common) if number != at else (common, own)
                assert all(f"{key!r}: {value}" in line for value, line in zip(values, (found, expected))), text
            assert found.partition(":")[2] != expected.partition(":")[2], text
        assert not errors


@pytest.mark.parametrize("world", (2, SLOW_4), ids="W{}".format)
def test_rows_that_no_plan_may_request_are_refused_by_their_owner(world: int, results: Results) -> None:
    *others, owner = [rank["errors"] for rank in results.facts("bad_rows", world)]
    assert all(set(errors.values()) == {None} for errors in others)
    assert owner.pop("good") is None and owner.pop("again") is None and len(owner) == 3
    for text in owner.values():
        assert text is not None and "rows of embed" in text and "rank 0" in text and "ascending" in text, text

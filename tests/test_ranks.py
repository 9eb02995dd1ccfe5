"""1, 2, 4 and 8 ranks compute the same run; what travels between them, who updates what, and that nothing else does.

What ranks do stands before the tests of it; they are forks (ranks.py) that meet over gloo. Most is compared with one
process, whose numbers are the other tests' business. A sum over ranks has another order than over slots: float64 runs
differ by rounding, 1e-14 of a loss as measured. Where all numbers are integers, all bits are equal.
"""
from __future__ import annotations

import base64
import contextlib
import hashlib
import inspect
import io
import json
import math
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common import Run, exact_array, few_layers, grad_of, losses, plan_of, set_grad, weights
from oracle import EXTRACT, WHOLE, Oracle, Trajectory
from pytest import MonkeyPatch
from ranks import COMM_TIMEOUT, Rank, Ranks
from torch import Tensor

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
Found = dict[str, Any]
worlds = pytest.mark.parametrize("world", WORLDS, ids="W{}".format)
few_worlds = pytest.mark.parametrize("world", (2, SLOW_4, SLOW_8), ids="W{}".format)
one_and_few_worlds = pytest.mark.parametrize("world", (1, 2, SLOW_4, SLOW_8), ids="W{}".format)
odd_worlds = pytest.mark.parametrize("world", [*WORLDS, pytest.param(3, marks=pytest.mark.all)], ids="W{}".format)

runs = pytest.mark.parametrize("case, world", [
    ("run_12", 2), ("run_12", 8), ("run_13", 2), ("run_single", 2), ("run_every", 2),
    *(pytest.param(*case, marks=pytest.mark.all) for case in (
        ("run_12", 4), ("run_13", 4), ("run_13", 8), ("run_single", 4), ("run_single", 8), ("run_every", 4),
        ("run_every", 8)))])


class Results:
    """What the ranks of a case found. A case: a function of a Rank, and its other arguments."""
    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def found(self, case: str, world: int) -> list[Found]:
        """By rank."""
        run, given = CASES[case]
        return self.ranks(world, run, **given)

    def folder(self, case: str, world: int) -> Path:
        run, given = CASES[case]
        return self.ranks.folder_of(world, run, **given)

    def arrays(self, case: str, world: int) -> list[Arrays]:
        """By rank."""
        return [{key: x for key, x in rank.items() if isinstance(x, np.ndarray)} for rank in self.found(case, world)]

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


def unpack(vectors: Path, folder: Path) -> None:
    """What the trajectory needs, without the compression that each rank would have to undo."""
    folder.mkdir()
    shutil.copy(vectors / "meta.json", folder)
    for name in ("traj.npz", "traj_init.npz"):
        with np.load(vectors / name) as arrays:
            np.savez(folder / name, **arrays)


@pytest.fixture(scope="module")
def results(ranks: Ranks, request: pytest.FixtureRequest) -> Results:
    write_data(ranks.folder)
    unpack(EXTRACT, ranks.folder / "extract")
    if request.config.getoption("--all") and WHOLE.is_dir():
        unpack(WHOLE, ranks.folder / "whole")
    return Results(ranks)


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


# ---- Whole runs: what ranks do ---------------------------------------------------------------------------------------

def kept_rows(executor: tg.Executor) -> dict[str, Tensor]:
    """Rows of tables that this rank owns, and of rowwise tables their state."""
    found = {}
    for label, table in executor.tables.items():
        if table.table.is_rowwise:
            table.home.settle()
            found |= {label: table.home.stored.rows, f"{label}.v": table.home.stored.v,
                      f"{label}.last": table.home.stored.last}
        else:
            found[label] = table.shard
    return found


def state_bytes(executor: tg.Executor) -> dict[str, bytes]:
    """Every byte that a run may change, found by walking through the objects and not by the list they keep."""
    optimizer, model = executor.optimizer, executor.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors |= {f"{label}.{name}": x for label, state in optimizer.state.items() for name, x in state.items()}
    tensors |= kept_rows(executor)
    tensors |= {f"{label}.row_grads": table.row_grads for label, table in executor.tables.items()}
    tensors |= {f"{label}.grad": table.grad for label, table in executor.tables.items() if table.home is None}
    found = {name: x.detach().contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""
             for name, x in tensors.items()}
    rows = [(label, len(table.pending), table.cached is None) for label, table in executor.tables.items()]
    plain = dict(rotary=executor.rotary, rows=rows)
    return found | dict(rng=torch.get_rng_state().numpy().tobytes(), plain=repr(plain).encode())


def weight_hashes(executor: tg.Executor) -> dict[str, str]:
    """Of what this rank holds."""
    state = state_bytes(executor)
    return {label: hashlib.sha256(state[label]).hexdigest() for label in executor.optimizer.model.table}


def all_arrays(executor: tg.Executor, values: tg.Values) -> dict[str, np.ndarray]:
    """weight.LABEL, whole: of tables on rank 0 only; slice.LABEL and part.LABEL.NAME: a rank's rows and its state.

    Every rank calls it. values: of the next step. A tied embedding is the head and has no rows of its own.
    """
    weights = {f"weight.{label}": exact_array(x) for label, x in executor.whole_weights(values).items()
               if x is not None}
    slices = {f"slice.{label}": exact_array(x) for label, x in kept_rows(executor).items()
              if label != "embed" or not values.tied}
    return weights | slices | {f"part.{label}.{name}": exact_array(x)
                               for label, state in executor.optimizer.state.items() for name, x in state.items()}


def tiny(**changes: Any) -> tg.Config:
    cfg = tg.Config(**tg.PRESETS["tiny"] | dict(device="cpu", comm_timeout=COMM_TIMEOUT) | changes)
    tg.check_config(cfg)
    return cfg


def whole_run(rank: Rank, warm: bool, **changes: Any) -> Found:
    """tg.train on the tiny preset: losses of this rank's slots per token, validation losses, weights, state, output."""
    cfg = tiny(run_dir=f"{rank.folder}/run", **changes)
    losses, validations, found = [], [], {}
    forward_backward, evaluate, warm_up, finish = (
        tg.Executor.forward_backward, tg.Executor.evaluate, tg.warm_up, tg.finish)

    def seen_forward_backward(self, batch, values, *rest):
        out = forward_backward(self, batch, values, *rest)
        losses.append(exact_array(out.slot_sums) / values.slot_tokens)
        return out

    def seen_evaluate(self, batches, values):
        validations.append((values.step, loss := evaluate(self, batches, values)))
        return loss

    def seen_warm_up(cfg, fabric, executor, log):
        found.update(initial=weight_hashes(executor), **{f"initial.{label}": exact_array(x)
                                                         for label, x in kept_rows(executor).items()})
        if not warm:
            return
        before = state_bytes(executor)
        warm_up(cfg, fabric, executor, log)
        after = state_bytes(executor)
        found.update(warm_up_steps=len(losses), left_by_warm_up=[name for name in after if after[name] != before[name]],
                     has_gradients=[label for label, p in executor.model.named_parameters() if p.grad is not None])
        losses.clear(), validations.clear()

    def seen_finish(log, preset, run_id, executor, *rest):
        arrays = all_arrays(executor, log.schedule.at(log.done))
        found.update({name: x for name, x in arrays.items() if rank.rank == 0 or not name.startswith("weight.")})
        found.update(final=weight_hashes(executor))
        return finish(log, preset, run_id, executor, *rest)

    with (MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed,
          contextlib.redirect_stderr(io.StringIO()) as errors):
        for owner, name, spy in ((tg.Executor, "forward_backward", seen_forward_backward),
                                 (tg.Executor, "evaluate", seen_evaluate), (tg, "warm_up", seen_warm_up),
                                 (tg, "finish", seen_finish)):
            patch.setattr(owner, name, spy)
        status = run(cfg, rank)
    assert status == 0, errors.getvalue()
    steps, values = zip(*validations)
    return found | dict(printed=printed.getvalue(), validation_steps=steps, slot_losses=np.stack(losses),
                        validation_losses=np.array(values))


def run(cfg: tg.Config, rank: Rank) -> int:
    """As main does it: the exit status of a run."""
    ending = SimpleNamespace(log=None, report_rows=lambda **facts: ending.log.event("comms", **facts))
    try:
        tg.train("tiny", cfg, rank.fabric(cfg), ending, Path(tg.__file__).read_bytes())
    except tg.TrainerError as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


def resumed(rank: Rank) -> Found:
    """A run in bf16 with checkpoints, in the folder "whole", and "two", which goes on from its last one."""
    whole, two = rank.folder / "whole", rank.folder / "two"
    first = ["--preset=tiny", "--device=cpu", "--seed=5", "--dtype=bfloat16", "--checkpoint_every=4",
             f"--comm_timeout={COMM_TIMEOUT}"]
    statuses = []
    for folder, flags in (whole, first), (two, [f"--resume={whole}"]):
        _, cfg = tg.parse_flags([*flags, f"--run_dir={folder}", f"--save={folder}_saved", "--sample_tokens=0"])
        with contextlib.redirect_stdout(io.StringIO()), MonkeyPatch.context() as patch:
            patch.setattr(tg, "warm_up", lambda *_: None)                     # it leaves no trace: run_12
            statuses.append(run(cfg, rank))
        if dist.is_initialized():
            dist.destroy_process_group()
        (rank.folder / "store").unlink(missing_ok=True)
    return dict(statuses=statuses)


def run_12(rank: Rank) -> Found:
    """On shards on disk, with warm-up but at 8 ranks, saved weights and a sample."""
    data = rank.folder.parent
    return whole_run(rank, warm=rank.world < 8, dtype="float64", train_files=f"{data}/train_*.bin",
                     val_files=f"{data}/val_*.bin", save=f"{rank.folder}/saved")


def run_13(rank: Rank, **changes: Any) -> Found:
    return whole_run(rank, warm=False, dtype="float64", num_extension_steps=4, sample_tokens=0, **changes)


def run_every(rank: Rank) -> Found:
    """Adam at every step, and tables of n-grams at every one and at every second one."""
    tables = "every_embed 2 200 stream 1 device 1; second_embed 3 300 1 0 host 2"
    return whole_run(rank, warm=rank.world == 2, dtype="float64", num_extension_steps=4, sample_tokens=0, adam_every=1,
                     tables=tg.parse_value("tables", tables))


def run_single(rank: Rank, **changes: Any) -> Found:
    return whole_run(rank, warm=False, dtype="float32", sample_tokens=0, **changes)


def other_orders(rank: Rank) -> Found:
    """run_single with what travels, and what is updated, the other way round."""
    with MonkeyPatch.context() as patch:
        for name in ("REDUCE_ORDER", "UPDATE_ORDER"):
            patch.setattr(tg, name, getattr(tg, name)[::-1])
        return run_single(rank)


def again_single(rank: Rank) -> Found:
    return run_single(rank)


def trajectory(rank: Rank, name: str, row_comms: str = "sparse") -> Found:
    """The oracle's numbers; a mismatch is this case's error."""
    fabric, path = rank.fabric(), rank.folder.parent / name
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = Trajectory(Oracle(path, row_comms=row_comms), fabric)
        run.check()
    return dict(compared=len(run.vectors.compared), printed=printed.getvalue(), final=weight_hashes(run.executor))


# ---- Whole runs ------------------------------------------------------------------------------------------------------

def test_the_runs_have_what_makes_them_hard(results: Results) -> None:
    """A stage change inside a cycle, the untying, a validation in mid-cycle, half a last cycle, several shards."""
    for case, extension in (("run_12", 3), ("run_13", 4), ("run_single", 3)):
        schedule = tg.Schedule(tg.Config(**tg.PRESETS["tiny"] | dict(num_extension_steps=extension)))
        assert any(start % 2 for start in schedule.starts[1:])
        assert schedule.untie_step < schedule.end_step - 1
        one, = results.found(case, 1)
        assert one["validation_steps"] == (0, 5, 10, schedule.end_step) and 5 % 2 == 1
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
    one, alone = results.found(case, 1)[0], results.arrays(case, 1)[0]
    ranks, arrays = results.found(case, world), results.arrays(case, world)
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


@pytest.mark.parametrize("world", (1, 2, SLOW_4), ids="W{}".format)
def test_warm_up_leaves_no_trace_on_any_rank(world: int, results: Results) -> None:
    for rank in results.found("run_12", world):
        assert rank["warm_up_steps"] > 4
        assert rank["left_by_warm_up"] == rank["has_gradients"] == []


@worlds
def test_rank_0_keeps_the_log_of_all(world: int, results: Results) -> None:
    """Tokens and validation losses of the whole run; where the ranks' own things stand is written down."""
    one, many = ([json.loads(line) for line in (results.folder("run_12", w) / "run/log.jsonl").read_text().splitlines()]
                 for w in (1, world))
    own = "phase", "comms"                 # W = 8 has no warm-up here; one rank reads rows of validation where they are
    types = [[entry["type"] for entry in log if entry["type"] not in own] for log in (one, many)]
    assert types[0] == types[1]
    for kind, field in (("step", "tokens"), ("val", "val_loss"), ("val", "step"), ("result", "tokens")):
        got, want = ([entry[field] for entry in log if entry["type"] == kind] for log in (many, one))
        assert want and got == pytest.approx(want, rel=0, abs=1e-9), (kind, field)
    assert [log[0]["world_size"] for log in (one, many)] == [1, world]
    assert {path.name for path in (results.folder("run_12", world) / "run").iterdir()} == {
        "log.txt", "log.jsonl", "settings.json", "train_gpt.py"}
    printed = [rank["printed"] for rank in results.found("run_12", world)]
    assert printed[0] and not any(printed[1:])


# ---- Ways in which rows travel ---------------------------------------------------------------------------------------

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

    one, two = (told(Run(results.folder(case, 2) / "run", 0, "", "").events) for case in ("run_single", "again_single"))
    assert one == two
    assert {"header", "step", "val", "comms", "result"} <= {entry["type"] for entry in one}
    assert_same_bits(*(results_of(case, 2, results) for case in ("again_single", "run_single")))


def test_two_ranks_resume_bitwise(results: Results) -> None:
    folder = results.folder("resumed", 2)
    whole, two = folder / "whole", folder / "two"
    assert [rank["statuses"] for rank in results.found("resumed", 2)] == [[0, 0]] * 2
    assert losses(two) == losses(whole)
    assert weights(folder / "two_saved") == weights(folder / "whole_saved")
    assert [entry["step"] for entry in Run(two, 0, "", "").of("resumed")] == [8], "after the untying"


# ---- The oracle ------------------------------------------------------------------------------------------------------

def check_trajectory(case: str, world: int, results: Results) -> None:
    """The ranks themselves compare; an array that is off is their error."""
    ranks = results.found(case, world)
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
    if not (results.ranks.folder / "whole").is_dir():
        pytest.skip("no ORACLE_DIR")
    check_trajectory("whole_trajectory", world, results)


# ---- Pieces of a step: what a call adds, and what it does not wait for -----------------------------------------------

COLLECTIVE_NAMES = ("all_", "reduce_scatter", "broadcast", "gather", "scatter", "send", "recv", "isend", "irecv",
                    "barrier", "batch_isend")
COLLECTIVES = ["reduce"] + [name for name, call in vars(dist).items()
                            if name.startswith(COLLECTIVE_NAMES) and inspect.isfunction(call)]


@contextlib.contextmanager
def collectives() -> Iterator[list[tuple[str, Tensor | None]]]:
    """Calls of torch.distributed by name, with a copy of the tensor that goes in."""
    calls, depth = [], []

    def spy(name: str, call: Callable) -> Callable:
        signature = inspect.signature(call)

        def counted(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            sent = next((given[key] for key in ("input", "input_tensor", "tensor") if key in given), None)
            if not depth:                                                     # some are made of others
                calls.append((name, sent.clone() if isinstance(sent, Tensor) else None))
            depth.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                depth.pop()
        return counted

    with MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, spy(name, getattr(dist, name)))
        yield calls


@torch.no_grad()
def fill_randomly(executor: tg.Executor, fabric: tg.Fabric) -> None:
    """No term of the forward pass is at zero, as it is at the start."""
    generator = torch.Generator().manual_seed(1)
    for row in executor.model.table.values():
        p, noise = executor.model.get_parameter(row.label), torch.randn(row.shape, generator=generator).double()
        mine = noise[fabric.rank::fabric.world] if row.label in executor.tables else noise
        p[:len(mine)] += 0.2 * mine
    if fabric.world == 1:                                                     # else it is read from the head
        executor.model.embed.copy_(executor.model.lm_head.t())


def tiny_run(fabric: tg.Fabric, steps: Sequence[int]) -> tuple[tg.Executor, list[tuple[tg.Values, tg.Batch]]]:
    """An executor with random weights in float64, and this rank's batches, the rows of the first of which are there."""
    plain = tiny(dtype="float64")
    headers = tg.find_shards(plain.train_files)
    cfg = tg.resolve(plain, headers, headers)
    executor = tg.Executor(cfg, fabric, tg.attention_reference, "plain")
    fill_randomly(executor, fabric)
    plan = [tg.Schedule(cfg).at(step) for step in steps]
    loader = tg.Loader(cfg, fabric, headers, [plan], executor.exchange_ahead)
    loader.start()
    batches = [(values, loader.next(values)) for values in plan]
    loader.close()
    for label, table in executor.tables.items():
        table.fetch(batches[0][1].plans[label], executor.model.lm_head)
    return executor, batches


def pieces(rank: Rank) -> Found:
    """A cycle with one call a step; with the slots cut, on odd ranks, into calls; with calls of weight 0 in between."""
    found, fabric, odd = dict(calls=[]), rank.fabric(), rank.rank % 2 == 1
    for way in ("whole", "cut", "extra"):
        executor, batches = tiny_run(fabric, (0, 1))
        for values, batch in batches:
            one_by_one = [batch.map(lambda x: x[slot:slot + 1]) for slot in reversed(range(len(batch.tokens)))]
            with collectives() as calls:
                for part in one_by_one if way == "cut" and odd else [batch]:
                    executor.forward_backward(part, values)
                    if way == "extra" and odd:
                        executor.forward_backward(one_by_one[0], values, 0.0)
            found["calls"] += [name for name, _ in calls]
            executor.optim_step(values)
        after = tg.Schedule(executor.cfg).at(2)
        found |= {f"{way}.{name}": x for name, x in all_arrays(executor, after).items()}
    return found


NO_WEIGHT = {                            # name -> has a rank nothing to add in a step?
    "last rank": lambda rank, step: rank.rank == rank.world - 1,
    "in turn": lambda rank, step: (rank.rank + step) % 2 == 0,
}


def weight_of_zero(rank: Rank) -> Found:
    """A cycle in which calls have weight 0, and the same by hand: with weight 1, and what it added taken out again."""
    found, fabric = {}, rank.fabric()
    for mix, idle in NO_WEIGHT.items():
        for way in ("weight", "hand"):
            executor, batches = tiny_run(fabric, (0, 1))
            optimizer = executor.optimizer
            dense = [label for label in optimizer.model.table if label not in executor.tables]
            row_grads = {label: table.row_grads for label, table in executor.tables.items()}
            for values, batch in batches:
                nothing = idle(rank, values.step)
                before = {label: torch.zeros_like(executor.model.get_parameter(label)) if grad is None else grad.clone()
                          for label in dense for grad in [grad_of(optimizer, label)]}
                rows_before = {label: x.clone() for label, x in row_grads.items()}
                executor.forward_backward(batch, values, 0.0 if nothing and way == "weight" else 1.0)
                if nothing and way == "hand":
                    for label in dense:
                        set_grad(optimizer, label, before[label])
                    for label, x in row_grads.items():
                        x.copy_(rows_before[label])
                executor.optim_step(values)
            arrays = all_arrays(executor, tg.Schedule(executor.cfg).at(2))
            found |= {f"{mix}/{way}/{name}": x for name, x in arrays.items()}
    return found


def nothing_to_add(rank: Rank) -> Found:
    """A step without any forward_backward."""
    executor, ((values, _),) = tiny_run(rank.fabric(), (1,))
    try:
        executor.optim_step(values)
    except tg.RunError as error:
        return dict(error=str(error))
    return dict(error="")


@one_and_few_worlds
def test_calls_add_up_and_wait_for_nobody(world: int, results: Results) -> None:
    """Odd ranks cut their slots into calls, last slot first; even ones make one call. No rank waits in a call."""
    for rank, facts in zip(results.arrays("pieces", world), results.found("pieces", world)):
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
    for rank in results.found("nothing_to_add", 2):
        assert "no gradient of" in rank["error"] and "attn" in rank["error"]


# ---- The optimizer with gradients by hand, on a model of which hardly anything can be dealt evenly -------------------

UNEVEN_SLOTS, UNEVEN_STEPS, UNTIE_STEP, CYCLE = 24, 6, 3, 2
UNEVEN_ROWS = dict(bigram_embed=7, value_embed=1026, embed=513)               # fewer than ranks, and not a multiple


def uneven_config(dtype: str, **changes: Any) -> tg.Config:
    stages = tuple(stage._replace(batch_tokens=256 * UNEVEN_SLOTS) for stage in tg.STAGES)     # room for all rows
    return tg.Config(**tg.PRESETS["tiny"] | dict(
        num_slots=UNEVEN_SLOTS, stages=stages, val_batch_tokens=16 * UNEVEN_SLOTS, val_tokens=16 * UNEVEN_SLOTS,
        dtype=dtype, num_heads=2, head_dim=8, model_dim=16, vocab_size=512, document_start=511, padded_vocab=513,
        bigram_rows=UNEVEN_ROWS["bigram_embed"], num_scheduled_steps=3, num_extension_steps=UNEVEN_STEPS - 3,
        device="cpu") | changes)


def uneven_executor(fabric: tg.Fabric, dtype: str, **changes: Any) -> tg.Executor:
    with few_layers():
        executor = tg.Executor(uneven_config(dtype, **changes), fabric, tg.attention_reference, "plain")
        assert {label: table.table.rows for label, table in executor.tables.items()} == UNEVEN_ROWS
        return executor


def integers(step: int, label: str, shape: Sequence[int]) -> Tensor:
    """A gradient of each slot, small integers: sums over slots and a cycle are below 256, exact in every dtype.

    A slot reads some of the rows of a table, and only they have a gradient.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step}/{label}".encode()))
    drawn = torch.randint(-2, 3, (UNEVEN_SLOTS, *shape), generator=generator)
    return drawn * rows_read(step, label)[..., None] if label in UNEVEN_ROWS else drawn


def rows_read(step: int, label: str) -> Tensor:
    """(slots, rows): what each slot reads of a table."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{step}/{label}/rows".encode()))
    return torch.rand(UNEVEN_SLOTS, UNEVEN_ROWS[label], generator=generator) < 0.15


def plan_rows(executor: tg.Executor, first: tg.Values, read: dict[str, np.ndarray]) -> dict[str, tuple]:
    """Plans of a cycle in which this rank reads these rows of each table: (plan, rows, where they stand)."""
    found = {}
    for label, rows in read.items():
        table, = [table for table in executor.planner.tables if table.label == label]
        plan, (places,) = plan_of(executor.planner, table, [rows.astype(np.int32)[None]], table.tied and first.tied,
                                  purpose="train", cycle=first.step // CYCLE, tokens=1)
        found[label] = plan, torch.from_numpy(rows), torch.from_numpy(places[0]).long()
    executor.exchange({label: plan for label, (plan, *_) in found.items()})
    return found


def by_hand(fabric: tg.Fabric, dtype: str, after_step: Callable[[int, tg.Executor], None] = lambda *_: None,
            prepare: Callable[[tg.Executor], None] = lambda _: None, **changes: Any) -> tg.Executor:
    """Six steps with the untying; each rank adds the gradients of its slots. The next cycle's rows come ahead of it."""
    executor, mine = uneven_executor(fabric, dtype, **changes), slice(fabric.rank, None, fabric.world)
    prepare(executor)
    schedule, plans = tg.Schedule(executor.cfg), {}
    assert schedule.untie_step == UNTIE_STEP, schedule.untie_step

    def planned(step: int) -> dict[str, tuple]:
        cycle = range(step, min(step + CYCLE, UNEVEN_STEPS))
        return plan_rows(executor, schedule.at(step), {label: np.flatnonzero(sum(
            rows_read(k, label)[mine].sum(dim=0) for k in cycle).numpy()) for label in UNEVEN_ROWS})

    plans[0] = planned(0)
    for step in range(UNEVEN_STEPS):
        for row in executor.model.table.values():
            p, grad = executor.model.get_parameter(row.label), integers(step, row.label, row.shape)[mine].sum(dim=0)
            if row.label in executor.tables:
                plan, rows, places = plans[step // CYCLE][row.label]
                _, row_grads = executor.tables[row.label].rows_for_forward(plan, executor.model.lm_head)
                row_grads.index_add_(0, places, grad[rows].to(row_grads.dtype))
            else:
                so_far = grad_of(executor.optimizer, row.label)
                set_grad(executor.optimizer, row.label, grad.to(p.dtype) + (0 if so_far is None else so_far))
        ahead = None
        if step % CYCLE and step + 1 < UNEVEN_STEPS:
            plans[(step + 1) // CYCLE] = planned(step + 1)
            ahead = {label: plan for label, (plan, *_) in plans[(step + 1) // CYCLE].items()}
        executor.optim_step(schedule.at(step), lambda: ahead)
        after_step(step, executor)
    return executor


def units_of(entry: tg.Sharded) -> Tensor:
    return tg.bank_matrices(entry.row, entry.weight.data)


def hand(rank: Rank, dtype: str, **changes: Any) -> Found:
    """Everything after the run, embed's and lm_head's state right after the untying, and the numbers of units."""
    found = {}

    def keep_untied(step: int, executor: tg.Executor) -> None:
        if step == UNTIE_STEP:
            both = ("part.embed", "part.lm", "weight.embed")
            arrays = all_arrays(executor, tg.Schedule(executor.cfg).at(step + 1))
            found.update({f"untied.{name}": x for name, x in arrays.items() if name.startswith(both)})

    executor = by_hand(rank.fabric(), dtype, keep_untied, **changes)
    entries = {label: entry for label, entry in executor.optimizer.entries.items() if label != tg.SMALL}
    owned = {label: len((entry if isinstance(entry, tg.Sharded) else entry.table).shard)
             for label, entry in entries.items()}
    units = {label: len(units_of(entry)) for label, entry in entries.items() if isinstance(entry, tg.Sharded)}
    end = tg.Schedule(executor.cfg).at(UNEVEN_STEPS)
    return found | all_arrays(executor, end) | dict(units=units, owned=owned)


def padding(rank: Rank) -> Found:
    """What is added for the communication is not a number: it must come nowhere. spoilt: how much of it there was."""
    def pad_with_nan(x: Tensor, pad: tuple) -> Tensor:
        return pad_zeros(x, pad, value=math.nan)

    spoilt, pad_zeros = [], torch.nn.functional.pad

    def spoil(executor: tg.Executor) -> None:
        for entry in executor.optimizer.entries.values():
            if isinstance(entry, tg.Sharded):
                for room in (entry.padded, entry.main_grad, entry.comm_buffer):
                    after = room[len(units_of(entry)):]
                    spoilt.append(len(after.fill_(math.nan)))

    with MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "pad", pad_with_nan)              # of tables, and of moments at the untying
        executor = by_hand(rank.fabric(), "float64", prepare=spoil)
        return all_arrays(executor, tg.Schedule(executor.cfg).at(UNEVEN_STEPS)) | dict(spoilt=sum(spoilt))


def orders(rank: Rank, count: int) -> Found:
    """Hash of all bits under other orders of communication; the first is the trainer's own, the second its reverse."""
    fabric, rng, found = rank.fabric(), np.random.default_rng(0), {}
    for number in range(count):
        with MonkeyPatch.context() as patch:
            for name in ("REDUCE_ORDER", "UPDATE_ORDER"):
                order = getattr(tg, name)
                order = (order, order[::-1])[number] if number < 2 else tuple(rng.permutation(order).tolist())
                patch.setattr(tg, name, order)
            state = state_bytes(by_hand(fabric, "float32"))
            found[f"{number}"] = {name: hashlib.sha256(x).hexdigest() for name, x in state.items()}
    return found


def counting(rank: Rank, **changes: Any) -> Found:
    """What travels in each optim_step. The gradient of the k-th label is filled with 2^k, which names it on the way."""
    executor = uneven_executor(rank.fabric(), "float64", **changes)
    optimizer, schedule, tables = executor.optimizer, tg.Schedule(executor.cfg), executor.tables
    code = {label: 2.0**k for k, label in enumerate(optimizer.model.table)}
    weights = dict(executor.model.named_parameters())
    label_at = {p.data.untyped_storage().data_ptr(): label for label, p in weights.items()}
    updates, found, plans = [], dict(reduced=[], sent=[], after=[], updated=[], kept=[], cleared=[]), {}

    def spy(update: Callable) -> Callable:
        def seen(p: Tensor, *rest) -> None:
            updates.append(label_at[p.untyped_storage().data_ptr()])
            update(p, *rest)
        return seen

    optimizer.normuon_update, optimizer.adam_update = map(spy, (optimizer.normuon_update, optimizer.adam_update))
    for step in range(UNEVEN_STEPS):
        before = {}
        if step % CYCLE == 0:
            every = {label: np.arange(rows) for label, rows in UNEVEN_ROWS.items()}
            plans = plan_rows(executor, schedule.at(step), every)
        for label, p in weights.items():
            if label in tables:
                plan, _, places = plans[label]
                tables[label].rows_for_forward(plan, executor.model.lm_head)[1][places] = code[label]
                before[label] = tables[label].row_grads.clone()
            else:
                set_grad(optimizer, label, torch.full_like(p, code[label]))
                before[label] = grad_of(optimizer, label)
        with collectives() as calls:
            executor.optim_step(schedule.at(step))
        names = [name for name, _ in calls]
        gathers = names.index("all_gather_into_tensor")                       # all sums have set off by then
        sums = [sent.unique().long().tolist() for _, sent in calls[:gathers]]
        found["reduced"].append([[label for label in code if any(total & int(code[label]) for total in totals)]
                                 for totals in sums])
        found["sent"].append([[name, list(sent.shape) if sent is not None else None] for name, sent in calls])
        found["after"].append(names[gathers:])
        found["updated"].append(list(updates))
        found["kept"].append([])
        found["cleared"].append([label for label, p in weights.items() if (
            not (tables[label].pending or tables[label].row_grads.any()) if label in tables
            else grad_of(optimizer, label) is None)])
        for label, p in weights.items():
            if label in tables:
                table = tables[label]
                kept = table.pending == [plans[label][0]] and table.row_grads.equal(before[label])
            else:
                grad = grad_of(optimizer, label)
                kept = grad is before[label] and bool((grad == code[label]).all())
            if kept:
                found["kept"][-1].append(label)
        updates.clear()
    return found


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
    ranks = results.found("hand_float64", world)
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
    ranks, arrays = results.found("hand_float64", world), results.arrays("hand_float64", world)
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
    assert world == 2 or all(rank["spoilt"] for rank in results.found("padding", world)), "2 divides the matrices"
    for got, want in zip(results.arrays("padding", world), results.arrays("hand_float64", world), strict=True):
        assert got.keys() == {key for key in want if not key.startswith("untied.")}
        for key, x in got.items():
            if key.split(".")[1] in TABLES:                                   # may hold such places, at its end
                x = x[np.isfinite(x).all(axis=1)]
                assert len(want[key]) - len(x) <= 1, key
            assert np.isfinite(x).all(), key
            np.testing.assert_array_equal(x, want[key][:len(x)])


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
    for rank in results.found(case, world):
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
    ranks, owned = results.found(case, world), results.found("hand_float64", world)
    of_the_head = [key for key in owned[0] if key.startswith("part.lm_head.")]
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
            moments = ["all_to_all_single"] * (len(of_the_head) * (step == 3))      # for the embedding
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


# ---- Saved weights ---------------------------------------------------------------------------------------------------

def saved(results: Results, world: int) -> Path:
    return results.folder("run_12", world) / "saved"


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
    cfg = tg.read_settings(saved(results, world))[1]
    assert {row.label: row.shape for row in tg.parameter_table(cfg)} == {
        label: tuple(x.shape) for label, x in tensors.items()}
    assert (cfg.vocab_size, cfg.document_start, cfg.dtype) == (VOCABULARY, DOCUMENT_START, "float64")


# ---- Agreement -------------------------------------------------------------------------------------------------------

def agreement(rank: Rank) -> Found:
    """Messages of check_agreement when the last rank, or the first, has another fact; and the lowest of a number."""
    fabric, same = rank.fabric(), {"--seed": "1", "data_sha256": "d1", "torch": "2"}
    last, first = rank.rank == rank.world - 1, rank.rank == 0
    tries = dict(same=same, last=same | ({"data_sha256": "d2"} if last else {}),
                 first=same | ({"--seed": "7"} if first else {}),
                 missing={name: fact for name, fact in same.items() if name != "torch" or not last})
    errors = {}
    for name, facts in tries.items():
        try:
            fabric.check_agreement(facts)
            errors[name] = None
        except tg.ConfigError as error:
            errors[name] = str(error)
    values = [5 - rank.rank, 5 + rank.rank, -rank.rank, 2**40 + rank.rank]
    return dict(errors=errors, lowest=[min(fabric.gather(value)) for value in values])


def other_flags(rank: Rank) -> Found:
    """A whole run in which the last rank has another flag: exit status, and what goes to stderr."""
    cfg = tiny(run_dir=f"{rank.folder}/run", adam_lr=0.009 if rank.rank == rank.world - 1 else 0.008)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        status = run(cfg, rank)
    return dict(status=status, errors=errors.getvalue())


def check_disagreement(message: str | None, name: str, first: str, other: str, rank: int) -> None:
    """Found, expected, do; the field, both values, and the rank."""
    assert message is not None, "no error on this rank"
    what, found, expected, do = message.split("\n")
    assert what.endswith(f"disagree about {name}"), message
    assert found.strip().startswith("found:") and expected.strip().startswith("expected:"), message
    assert all(part in found for part in (first, other, f"rank {rank}", "rank 0")) and "same flags" in do, message


@worlds
def test_ranks_that_disagree_all_say_so(world: int, results: Results) -> None:
    for rank in results.found("agreement", world):
        assert rank["errors"]["same"] is None
        check_disagreement(rank["errors"]["last"], "data_sha256", "d1", "d2", world - 1)
        check_disagreement(rank["errors"]["first"], "--seed", "7", "1", 1)
        check_disagreement(rank["errors"]["missing"], "torch", "2", "None", world - 1)


def test_one_rank_agrees_with_itself(results: Results) -> None:
    rank, = results.found("agreement", 1)
    assert rank["errors"]["same"] is None and rank["lowest"] == [5, 5, 0, 2**40]


@worlds
def test_the_lowest_of_all_ranks(world: int, results: Results) -> None:
    for rank in results.found("agreement", world):
        assert rank["lowest"] == [5 - (world - 1), 5, -(world - 1), 2**40]


@worlds
def test_a_run_with_other_flags_on_one_rank_ends_before_it_starts(world: int, results: Results) -> None:
    """On every rank with status 2. That only one speaks is for a launcher's store to arrange, which is not here."""
    ranks = results.found("other_flags", world)
    assert [rank["status"] for rank in ranks] == [2] * world
    for rank in ranks:
        check_disagreement(rank["errors"].rstrip(), "--adam_lr", "0.008", "0.009", world - 1)
    assert not (results.folder("other_flags", world) / "run").exists(), "no log of a run that never was"


CASES = {                                # name -> what to do, its other arguments
    "agreement": (agreement, {}),
    "other_flags": (other_flags, {}),
    "run_12": (run_12, {}),
    "run_13": (run_13, {}),
    "run_single": (run_single, {}),
    "again_single": (again_single, {}),
    "orders_single": (other_orders, {}),
    "run_every": (run_every, {}),
    "dense_13": (run_13, dict(row_comms="dense")),
    "dense_single": (run_single, dict(row_comms="dense")),
    "debug_13": (run_13, dict(debug_rows=1)),
    "resumed": (resumed, {}),
    "trajectory": (trajectory, dict(name="extract")),
    "trajectory_dense": (trajectory, dict(name="extract", row_comms="dense")),
    "whole_trajectory": (trajectory, dict(name="whole")),
    "pieces": (pieces, {}),
    "weight_of_zero": (weight_of_zero, {}),
    "nothing_to_add": (nothing_to_add, {}),
    "hand_float64": (hand, dict(dtype="float64")),
    "hand_float32": (hand, dict(dtype="float32")),
    "hand_bfloat16": (hand, dict(dtype="bfloat16")),
    "hand_dense": (hand, dict(dtype="float64", row_comms="dense")),
    "padding": (padding, {}),
    "orders": (orders, dict(count=5)),
    "many_orders": (orders, dict(count=40)),
    "counting": (counting, {}),
    "counting_dense": (counting, dict(row_comms="dense")),
}

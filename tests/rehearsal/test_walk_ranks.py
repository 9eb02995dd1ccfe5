"""Ranks on cards that are not there agree on what they say to one another, and a mistake is named by rank and line.

The comparison is tried on made-up recordings. Under --all eight ranks of the record preset are walked, and a few of a
small model with mistakes planted in a copy of the trainer.
"""
from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agreement
import numpy as np
import pytest
from common import ROOT
from test_rehearsal import copy_with, environment_of, needs_tool

import train_gpt as tg

LIMIT = 2400                             # s for a walk of all ranks, far more than it takes: a hang is to end
WORLD = 4                                # of made-up recordings

Recordings = list[agreement.Recording]


# ---- Made-up recordings
def launch(group: str, name: str, subject: str, out: list, source: list, **more: Any) -> agreement.Launch:
    made = dict(group=group, name=name, settings="", subject=subject, out=out, out_splits=None, in_splits=None,
                place="step 1", line=f"launch of {subject}", awaited=f"wait for {subject}")
    made["in"] = source
    return made | more


def rows_of(rank: int, subject: str, counts: np.ndarray, dtype: str = "bfloat16") -> agreement.Launch:
    """A list from each rank to each; counts (sender, reader)."""
    leaving = counts[rank].tolist()
    arriving = counts[:, rank].tolist()
    return launch("nccl", agreement.LISTS, subject, [dtype, [sum(arriving), 8]], [dtype, [sum(leaving), 8]],
                  out_splits=arriving, in_splits=leaving)


def sums_of(subject: str, shape: list[int]) -> agreement.Launch:
    return launch("nccl", "all_reduce", subject, ["float32", shape], ["float32", shape], settings="op=SUM")


@functools.cache
def agreeing() -> str:
    """Four ranks; two parameters have one shape, one rank reads nothing, one is asked for nothing."""
    rng = np.random.default_rng(7)
    fetched = rng.integers(1, 9, (WORLD, WORLD))
    fetched[:, 1] = 0
    fetched[2] = 0
    recordings = []
    for rank in range(WORLD):
        launches = [
            launch("gloo", "all_gather_object", "", ["object", []], ["object", []]),
            launch("plans", agreement.LISTS, "", ["int64", [WORLD, 3]], ["int64", [WORLD, 3]]),
            rows_of(rank, "bigram_embed", fetched),
            launch("nccl", "reduce_scatter_tensor", "attn", ["bfloat16", [3, 5]], ["bfloat16", [12, 5]]),
            sums_of("smear_gate", [1, 12]),
            sums_of("skip_gate", [1, 12]),
            rows_of(rank, "bigram_embed", fetched.T),
            launch("nccl", "all_gather_into_tensor", "attn", ["bfloat16", [12, 5]], ["bfloat16", [3, 5]])]
        recordings.append(dict(launches=launches, error="", ended=float(rank)))
    return json.dumps(recordings)


def made_up() -> Recordings:
    return json.loads(agreeing())


def on_device(recordings: Recordings, rank: int) -> list[agreement.Launch]:
    return agreement.of_group(recordings[rank], "nccl")


def swap(recordings: Recordings, rank: int, first: int, second: int) -> None:
    launches = recordings[rank]["launches"]
    launches[first], launches[second] = launches[second], launches[first]


def swap_scatter_and_sum(recordings: Recordings) -> None:
    swap(recordings, 3, 3, 4)


def swap_sums_of_one_shape(recordings: Recordings) -> None:
    swap(recordings, 2, 4, 5)


def send_a_row_more(recordings: Recordings) -> None:
    sent = on_device(recordings, 3)[0]
    sent["in_splits"][0] += 1
    sent["in"][1][0] += 1


def expect_a_row_of_an_empty_list(recordings: Recordings) -> None:
    read = on_device(recordings, 1)[0]
    read["out_splits"][2] = 1
    read["out"][1][0] += 1


def leave_out_a_sum(recordings: Recordings) -> None:
    del recordings[1]["launches"][4]


def leave_out_the_last(recordings: Recordings) -> None:
    recordings[2]["launches"].pop()


def send_other_dtype(recordings: Recordings) -> None:
    on_device(recordings, 3)[4]["in"][0] = "float32"


def announce_in_other_dtype(recordings: Recordings) -> None:
    announced = agreement.of_group(recordings[1], "plans")[0]
    announced["in"][0] = announced["out"][0] = "int32"


def forget_a_wait(recordings: Recordings) -> None:
    on_device(recordings, 2)[1]["awaited"] = ""


def forget_the_last_wait(recordings: Recordings) -> None:
    on_device(recordings, 0)[-1]["awaited"] = ""


def gather_into_too_little(recordings: Recordings) -> None:
    for rank in range(WORLD):
        on_device(recordings, rank)[-1]["out"][1][0] -= 1


def count_rows_that_are_not_there(recordings: Recordings) -> None:
    on_device(recordings, 3)[0]["in_splits"][0] += 1


def reduce_otherwise(recordings: Recordings) -> None:
    on_device(recordings, 1)[2]["settings"] = "op=AVG"


def end_early(recordings: Recordings) -> None:
    recordings[2]["error"] = "DataError: no such file in find_shards: open(path)"


# mistake, what the first line of the answer begins with, what is in it too
MISTAKES = [
    (swap_scatter_and_sum, "order: rank 3, collective 1 of nccl: all_reduce", "launch of attn"),
    (swap_sums_of_one_shape, "order: rank 2, collective 2 of nccl: all_reduce op=SUM skip_gate",
     "launch of smear_gate"),
    (send_a_row_more, "count: rank 3 sends", "to rank 0, which expects"),
    (expect_a_row_of_an_empty_list, "count: rank 2 sends 0 rows to rank 1, which expects 1", "collective 0 of nccl"),
    (leave_out_a_sum, "order: rank 1, collective 2 of nccl: all_reduce op=SUM skip_gate", "launch of smear_gate"),
    (leave_out_the_last, "order: rank 2, collective 5 of nccl: nothing more", "all_gather_into_tensor attn"),
    (send_other_dtype, "order: rank 3, collective 4 of nccl: all_to_all_single bigram_embed in float32", "in bfloat16"),
    (announce_in_other_dtype, "order: rank 1, collective 0 of plans: all_to_all_single in int32", "in int64"),
    (forget_a_wait, "wait: rank 2 never waits for collective 1 of nccl: reduce_scatter_tensor attn", "launch of attn"),
    (forget_the_last_wait, "wait: rank 0 never waits for collective 5 of nccl", "launch of attn"),
    (gather_into_too_little, "size: rank 0, collective 5 of nccl: 55 numbers come, room for 60", "launch of attn"),
    (count_rows_that_are_not_there, "size: rank 3, collective 0 of nccl: counts", "launch of bigram_embed"),
    (reduce_otherwise, "order: rank 1, collective 2 of nccl: all_reduce op=AVG smear_gate", "op=SUM"),
    (end_early, "rank 2 ended early: DataError", "find_shards"),
]


def test_ranks_that_agree_are_left_in_peace():
    recordings = made_up()
    assert agreement.disagreements(recordings) == []
    # Twice in each direction: 4 pairs with rank 1 as reader, 4 with rank 2 as sender, one of them in both.
    assert agreement.empty_lists(recordings, "nccl") == 2 * 7


@pytest.mark.parametrize("mistake, beginning, part", MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_mistake_is_named(mistake: Callable, beginning: str, part: str):
    recordings = made_up()
    mistake(recordings)
    found = agreement.disagreements(recordings)
    assert found
    assert found[0].startswith(beginning)
    assert part in found[0]


def test_two_wrong_counts_are_both_told():
    recordings = made_up()
    send_a_row_more(recordings)
    expect_a_row_of_an_empty_list(recordings)
    counts = [line for line in agreement.disagreements(recordings) if line.startswith("count")]
    assert len(counts) == 2


def test_ranks_are_compared_up_to_where_one_ended():
    recordings = made_up()
    end_early(recordings)
    del recordings[2]["launches"][6:]
    send_other_dtype(recordings)                              # after that
    swap_scatter_and_sum(recordings)                          # before it
    found = agreement.disagreements(recordings)
    assert len(found) == 2
    assert found[1].startswith("order: rank 3, collective 1")


def test_the_rank_that_ended_first_is_named_first():
    recordings = made_up()
    end_early(recordings)
    recordings[1]["error"] = "RuntimeError: connection closed by peer"
    recordings[1]["ended"] = recordings[2]["ended"] + 1
    found = agreement.disagreements(recordings)
    assert found[0].startswith("rank 2")
    assert found[1].startswith("rank 1")


def test_no_rank_is_thought_right_because_it_is_the_first():
    """Rank 0 alone is out of order: it is named, not the other three."""
    recordings = made_up()
    swap(recordings, 0, 3, 4)
    found = agreement.disagreements(recordings)
    assert len(found) == 1
    assert found[0].startswith("order: rank 0")


# ---- Real ranks
def walked(root: Path, folder: Path, cache: Path, *words: str) -> tuple[str, Recordings]:
    """What walk_ranks.py of that tree prints, and the recordings."""
    out = folder / "recordings.json"
    command = [sys.executable, str(root / "tests/walk_ranks.py"), f"--out={out}", f"--logs={folder}", *words]
    done = subprocess.run(command, env=environment_of(cache), capture_output=True, text=True, timeout=LIMIT)
    logs = "".join(path.read_text()[-1500:] for path in sorted(folder.glob("*.log")))
    assert out.exists(), done.stdout + done.stderr + logs
    return done.stdout, json.loads(out.read_text())


@pytest.mark.all
@needs_tool
def test_eight_ranks_of_the_record_preset_agree(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture):
    said, recordings = walked(ROOT, tmp_path, cache, "--ranks=8")
    with capsys.disabled():
        print("\n" + said)
    assert agreement.disagreements(recordings) == []
    assert agreement.groups_of(recordings) == ["gloo", "plans", "nccl"]

    launches = agreement.of_group(recordings[0], "nccl")
    places = {launch["place"] for launch in launches}
    assert {f"step {step}" for step in range(8)} <= places    # two of each stage and of the extension
    assert {launch["subject"] for launch in launches} >= {*tg.REDUCE_ORDER, "m", "v"}
    lists = [launch for launch in launches if launch["name"] == agreement.LISTS]
    assert {"bigram_embed", "value_embed", "embed"} <= {launch["subject"] for launch in lists}
    assert max(launch["in"][1][0] for launch in lists) > 10_000
    assert agreement.empty_lists(recordings, "nccl") > 0
    leaving = [launch["in"][1][0] for rank in range(8) for launch in on_device(recordings, rank)]
    assert min(leaving) == 0                                  # a rank that has nothing for anyone takes part


@dataclass
class Mistake:
    text: str                            # of the trainer
    instead: str                         # what stands there in the copy
    said: list[str]                      # in the first line of the answer
    steps: int = 2                       # of the run; the warm-up takes no later ones


REDUCED = "        for label in self.reduce_order:\n"
SUMMED = "self.wait = launch(self.optimizer.fabric, dist.all_reduce, self.grad)"
DEALT = 'for name, moment in self.state["embed"].items():'
LISTS = "        return dist.all_to_all_single(out, rows, recv_counts, send_counts, async_op=True).wait\n"
SENT = "return self._launch(plan, arriving, rows, plan.send_counts, plan.recv_counts)"
RETURNED = "wait = self._launch(plan, arrived, rows, plan.recv_counts, plan.send_counts)"
PLANTED = {
    "one rank reduces in reverse": Mistake(
        REDUCED, "        for label in self.reduce_order[::-1] if self.fabric.rank == 3 else self.reduce_order:\n",
        ["order: rank 3, collective", "nccl: reduce_scatter_tensor op=SUM mlp", "Sharded.reduce", "op=SUM attn"]),
    "one rank leaves a sum out": Mistake(
        SUMMED, f"self.wait = no_wait\n        if self.optimizer.fabric.rank != 1:\n            {SUMMED}",
        ["order: rank 1, collective", "Small.reduce", "all_reduce op=SUM small"]),
    "one rank deals moments of one shape in another order": Mistake(
        DEALT, DEALT.replace(":", ' if self.fabric.rank != 2 else reversed(self.state["embed"].items()):'),
        ["order: rank 2, collective", "nccl: all_gather_into_tensor v", "Optimizer._untie",
         "all_gather_into_tensor m"], 8),
    "who has an empty list stays away": Mistake(
        LISTS, "        if len(rows) == 0:\n            return no_wait\n" + LISTS,
        ["order: rank", "all_to_all_single value_embed", "RowTable._launch"], 8),
    "an owner drops a row": Mistake(
        SENT, "counts, leaving = list(plan.recv_counts), rows\n        if self.fabric.rank == 2:\n"
        "            counts[0] -= 1\n            leaving = leaving[1:]\n"
        "        return self._launch(plan, arriving, leaving, plan.send_counts, counts)",
        ["count: rank 2 sends", "to rank 0, which expects", "bigram_embed", "RowTable._launch"]),
    "gradients travel with the counts of the fetch": Mistake(
        RETURNED, RETURNED.replace("plan.recv_counts, plan.send_counts", "plan.send_counts, plan.recv_counts"),
        ["size: rank 0, collective", "counts [", "value_embed", "RowTable._launch"]),
    "one rank is killed": Mistake(
        REDUCED, "        if self.fabric.rank == 1:\n            os.kill(os.getpid(), signal.SIGKILL)\n" + REDUCED,
        ["rank 1 ended early: killed"]),
}


def test_what_mistakes_are_planted_in_is_there():
    trainer = (ROOT / "train_gpt.py").read_text("utf-8")
    assert [trainer.count(mistake.text) for mistake in PLANTED.values()] == [1] * len(PLANTED)


@pytest.mark.all
@needs_tool
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_in_the_trainer_is_named_by_rank_and_line(name: str, tmp_path: Path, cache: Path):
    mistake = PLANTED[name]
    root = copy_with(tmp_path / "tree", {mistake.text: mistake.instead})
    said, recordings = walked(root, tmp_path, cache, "--ranks=4", "--", "--preset=tiny", "--dtype=bfloat16",
                              "--num_slots=4", f"--max_steps={mistake.steps}", "--sample_tokens=0")
    found = agreement.disagreements(recordings)
    assert found, said
    assert found[0] in said
    for part in mistake.said:
        assert part in found[0]

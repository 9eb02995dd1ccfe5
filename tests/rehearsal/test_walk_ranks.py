"""Ranks on cards that are not there agree on what they say to one another, and a mistake is named by rank and line.

The comparison is tried on made-up recordings. Under --all eight ranks of the record preset are walked, and a few of a
small model with mistakes planted in a copy of the trainer.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import ROOT

import train_gpt as tg
from rehearsal import agreement
from rehearsal.test_rehearsal import copy_with, needs_tool, started

LIMIT = 2400                             # s for a walk of all ranks, far more than it takes: a hang is to end
WORLD = 4                                # of made-up recordings


def launch(group: str, name: str, subject: str, out: list, source: list, **more: Any) -> agreement.Launch:
    made = dict(group=group, name=name, settings="", subject=subject, out=["bfloat16", out], out_splits=None,
                in_splits=None, place="step 1", line=f"launch of {subject}", awaited=f"wait for {subject}")
    made["in"] = ["bfloat16", source]
    return made | more


def made_up() -> list[agreement.Recording]:
    """Four ranks that agree; two sums have one shape, rank 1 reads nothing, rank 2 is asked for nothing."""
    fetched = np.random.default_rng(7).integers(1, 9, (WORLD, WORLD))         # (sender, reader)
    fetched[:, 1] = 0
    fetched[2] = 0
    recordings = []
    for rank in range(WORLD):
        leaving = fetched[rank].tolist()
        arriving = fetched[:, rank].tolist()
        launches = [
            launch("plans", agreement.LISTS, "", [WORLD, 3], [WORLD, 3]),
            launch("nccl", agreement.LISTS, "bigram_embed", [sum(arriving), 8], [sum(leaving), 8],
                   out_splits=arriving, in_splits=leaving),
            launch("nccl", "reduce_scatter_tensor", "attn", [3, 5], [12, 5]),
            launch("nccl", "all_reduce", "smear_gate", [1, 12], [1, 12], settings="op=SUM"),
            launch("nccl", "all_reduce", "skip_gate", [1, 12], [1, 12], settings="op=SUM"),
            launch("nccl", "all_gather_into_tensor", "attn", [12, 5], [3, 5])]
        recordings.append(dict(launches=launches, error="", ended=float(rank)))
    return recordings


FETCH, SCATTER, SUM, OTHER_SUM, GATHER = range(1, 6)          # places in a recording


def make(mistake: tuple, launches: list) -> None:
    """swap two places, drop one, or set what follows its keys there."""
    what, place, *rest = mistake
    if what == "swap":
        other, = rest
        launches[place], launches[other] = launches[other], launches[place]
    elif what == "drop":
        del launches[place]
    else:
        *keys, last, value = rest
        found = launches[place]
        for key in keys:
            found = found[key]
        found[last] = value


# The rank that makes it, the mistake, parts of the first line that is said.
MISTAKES = [
    (3, ("swap", SCATTER, SUM), ["order: rank 3, collective 1 of nccl: all_reduce", "launch of attn"]),
    (2, ("swap", SUM, OTHER_SUM), ["order: rank 2, collective 2 of nccl: all_reduce op=SUM skip_gate", "smear_gate"]),
    (0, ("swap", SUM, OTHER_SUM), ["order: rank 0, collective 2"]),           # not right for being the first
    (1, ("drop", SUM), ["order: rank 1, collective 2 of nccl: all_reduce op=SUM skip_gate"]),
    (2, ("drop", GATHER), ["order: rank 2, collective 4 of nccl: nothing more"]),
    (3, ("set", GATHER, "in", 0, "float32"), ["order: rank 3, collective 4 of nccl", "float32"]),
    (1, ("set", SUM, "settings", "op=AVG"), ["order: rank 1, collective 2 of nccl", "op=AVG", "op=SUM"]),
    (1, ("set", 0, "in", 0, "int32"), ["order: rank 1, collective 0 of plans"]),
    (2, ("set", SCATTER, "awaited", ""), ["wait: rank 2 never waits for collective 1 of nccl: reduce_scatter_tensor"]),
    (3, ("set", FETCH, "in_splits", 0, 99), ["size: rank 3: counts", "bigram_embed"])]


def test_ranks_that_agree_are_left_in_peace():
    assert agreement.disagreements(made_up()) == []
    assert agreement.empty_lists(made_up(), "nccl") == 7      # 4 with rank 1 as reader, 4 with rank 2 as sender


@pytest.mark.parametrize("rank, mistake, said", MISTAKES)
def test_a_planted_mistake_is_named(rank, mistake, said):
    recordings = made_up()
    make(mistake, recordings[rank]["launches"])
    found = agreement.disagreements(recordings)
    assert found and all(part in found[0] for part in said), found


# ---- Real ranks -----------------------------------------------------------------------------------------------------

def walked(root: Path, cache: Path, *words: str) -> tuple[str, list[agreement.Recording]]:
    """What walk_ranks.py of that tree prints, and the recordings."""
    out = cache / f"{root.name}.json"
    process = started(root, cache, "tests/walk_ranks.py", f"--out={out}", *words)
    said, _ = process.communicate(timeout=LIMIT)
    assert out.exists(), said
    return said, json.loads(out.read_text())


@pytest.mark.all
@needs_tool
def test_eight_ranks_of_the_record_preset_agree(cache: Path):
    said, recordings = walked(ROOT, cache, "--ranks=8")
    assert agreement.disagreements(recordings) == [], said
    assert agreement.groups_of(recordings) == ["gloo", "plans", "nccl"]

    launches = agreement.of_group(recordings[0], "nccl")
    assert {f"step {step}" for step in range(8)} <= {launch["place"] for launch in launches}      # two of each stage
    assert {launch["subject"] for launch in launches} >= {*tg.REDUCE_ORDER, "m", "v"}
    lists = [launch for launch in launches if launch["name"] == agreement.LISTS]
    assert {"bigram_embed", "value_embed", "embed"} <= {launch["subject"] for launch in lists}
    assert agreement.empty_lists(recordings, "nccl") > 0


REDUCED = "        for label in self.reduce_order:\n"
SUMMED = "self.wait = self.optimizer.launch(dist.all_reduce, self.grad)"
LISTS = "        return dist.all_to_all_single(out, rows, recv_counts, send_counts, async_op=True).wait\n"
RETURNED = "wait = self._launch(plan, arrived, rows, plan.recv_counts, plan.send_counts)"
PLANTED = {                              # text of the trainer, what stands there in the copy, said, steps
    "one rank reduces in reverse": (
        REDUCED, "        for label in self.reduce_order[::-1] if self.fabric.rank == 3 else self.reduce_order:\n",
        ["order: rank 3, collective", "nccl: reduce_scatter_tensor op=SUM mlp", "Sharded.reduce", "op=SUM attn"], 2),
    "one rank leaves a sum out": (
        SUMMED, f"self.wait = no_wait\n        if self.optimizer.fabric.rank != 1:\n            {SUMMED}",
        ["order: rank 1, collective", "Small.reduce", "all_reduce op=SUM small"], 2),
    "who has an empty list stays away": (
        LISTS, "        if len(rows) == 0:\n            return no_wait\n" + LISTS,
        ["order: rank", "all_to_all_single value_embed", "RowTable._launch"], 8),
    "gradients travel with the counts of the fetch": (
        RETURNED, RETURNED.replace("plan.recv_counts, plan.send_counts", "plan.send_counts, plan.recv_counts"),
        ["size: rank 0", "counts [", "value_embed", "RowTable._launch"], 2),
    "one rank is killed": (
        REDUCED, "        if self.fabric.rank == 1:\n            os.kill(os.getpid(), signal.SIGKILL)\n" + REDUCED,
        ["rank 1 ended early: killed"], 2)}


@pytest.mark.house
def test_what_mistakes_are_planted_in_is_there():
    trainer = (ROOT / "train_gpt.py").read_text("utf-8")
    assert [trainer.count(text) for text, *_ in PLANTED.values()] == [1] * len(PLANTED)


@pytest.mark.all
@needs_tool
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_in_the_trainer_is_named_by_rank_and_line(name: str, tmp_path: Path, cache: Path):
    text, instead, parts, steps = PLANTED[name]
    root = copy_with(tmp_path / "tree", {text: instead})
    said, recordings = walked(root, cache, "--ranks=4", "--", "--preset=tiny", "--dtype=bfloat16", "--num_slots=4",
                              f"--max_steps={steps}", "--sample_tokens=0")
    found = agreement.disagreements(recordings)
    assert found and found[0] in said and all(part in found[0] for part in parts), said

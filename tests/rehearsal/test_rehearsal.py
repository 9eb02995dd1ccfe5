"""The rehearsal: what a run does on GPUs is what the ledger says, and what may not be is found and named."""
from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from common import ROOT, executor, preset, random_batch

import rehearse
import train_gpt as tg

REASON = rehearse.why_not()
needs_tool = pytest.mark.skipif(bool(REASON), reason=f"the rehearsal: {REASON}")
needs_ledger = pytest.mark.skipif(not rehearse.LEDGER.exists(), reason="no ledger: python tests/rehearse.py --update")


def command_of(*arguments: str, root: Path = ROOT) -> list[str]:
    return [sys.executable, str(root / "tests/rehearse.py"), *arguments]


def environment_of(cache: Path) -> dict[str, str]:
    return dict(os.environ, REHEARSAL_CACHE=str(cache), OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def quick(cache: Path) -> Iterator[subprocess.Popen]:
    """The quick part, under way: it takes a core of its own."""
    command = command_of("--quick")
    with subprocess.Popen(command, env=environment_of(cache), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True) as process:
        yield process
        process.kill()


# ------ Today's trainer -----------------------------------------------------------------------------------------------

@needs_tool
@needs_ledger
@pytest.mark.all
def test_everything_is_as_the_ledger_says(cache):
    done = subprocess.run(command_of(), env=environment_of(cache), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_traced_stage_of_tiny_is_the_eager_one_bit_for_bit(monkeypatch, request):
    """Backend aot_eager: the graphs as they are traced, run operation by operation.

    Both take the branches that are for compilers, which are to fuse: of the loss, other operations.
    """
    if not REASON and rehearse.LEDGER.exists():
        request.getfixturevalue("quick")                                      # for the test below
    cfg = preset("tiny", dtype="bfloat16")
    schedule = tg.Schedule(cfg)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = {}
    for compiled in (0, 1):
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            ex = executor(replace(cfg, compile=compiled))
            ex.model.set_initial_values(cfg.seed, ex.shard)
            for step in range(cfg.adam_every):
                losses = ex.forward_backward(random_batch(cfg, step, 2, 64), schedule.at(step))
                ex.optim_step(schedule.at(step))
        found[compiled] = dict(ex.state_tensors(), losses=losses.slot_sums)
    torch._dynamo.reset()
    assert found[0].keys() == found[1].keys()
    different = [name for name, x in found[0].items() if not torch.equal(x, found[1][name])]
    assert not different


@needs_tool
@needs_ledger
def test_the_walk_and_the_first_stage_are_those_of_the_ledger(quick):
    said, _ = quick.communicate()
    assert quick.returncode == 0, said


@needs_tool
def test_what_a_walk_counts(cache):
    """Each count against one of another kind: walk_counts.py, in a process of its own."""
    command = [sys.executable, str(ROOT / "tests/walk_counts.py")]
    done = subprocess.run(command, env=environment_of(cache), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------ Mistakes on purpose, in a copy of the trainer -----------------------------------------------------------------

def copy_with(folder: Path, changes: dict[str, str]) -> Path:
    """The trainer with these texts replaced, and the tools of the rehearsal beside it."""
    text = (ROOT / "train_gpt.py").read_text("utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{text.count(old)} times in the trainer: {old}"
        text = text.replace(old, new)
    tests = folder / "tests"
    tests.mkdir(parents=True)
    for name in ("rehearse.py", "walk.py", "walk_ranks.py", "agreement.py", "phantom.py", "phantom.cpp", "price.py",
                 "rates.json", "rehearsal.json"):
        if (ROOT / "tests" / name).exists():
            shutil.copy(ROOT / "tests" / name, tests)
    (folder / "train_gpt.py").write_text(text, "utf-8")
    return folder


def walk(root: Path, cache: Path, *arguments: str) -> dict[str, Any]:
    out = root / "found.json"
    command = [sys.executable, str(root / "tests/walk.py"), f"--out={out}", *arguments]
    done = subprocess.run(command, env=environment_of(cache), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def failures_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(failure["kind"], failure["where"]) for failure in found["failures"]]


def expect(failures: list[tuple[str, str]], kind: str, *wheres: str) -> None:
    named = [where for of_kind, where in failures if of_kind == kind]
    for where in wheres:
        assert any(where in name for name in named), f"{kind} in {where} is not among {failures}"


STEP = "        self.optimizer.step(values, plans_ahead)\n"
SUMS = "            sums.append(slot_sums.detach())\n"
ADD = "        add_rows(ctx.row_grads, index, grad)\n"
SCRATCH = "            grad_w = accumulate_wgrad(ctx.part, product, None)                # it cannot add: a scratch\n"
LAUNCH = "    launch(row_grads, rows, order, grad.contiguous(), count, width, **sizes)\n"
KERNEL = '@custom_op("train_gpt::add_rows", "row_grads")\n'
WIDE_KERNEL = """
def wide_kernel(x, NUMBERS: tl.constexpr):
    place = tl.arange(0, NUMBERS)
    values = tl.load(x + place)
    tl.store(x + NUMBERS - 1 - place, values)


"""
EAGER_MISTAKES = {
    SUMS: SUMS + "            print(float(losses.sum()))\n",                           # a wait
    STEP: "        self.fabric.synchronize()\n"                                         # a wait
          "        spare = [torch.zeros_like(table.row_grads) for table in self.tables.values()]\n"     # table size
          "        dist.all_reduce(torch.ones(1000, device=self.fabric.device))\n"      # growth
          + STEP,
    ADD: "        dense = ctx.row_grads.clone()\n"                                       # table size
         "        bank = grad.new_zeros(22, 3072, 768)\n" + ADD,                          # a gradient's size
    SCRATCH: SCRATCH + "            product = product.clone()\n",                         # a gradient's size
    KERNEL: WIDE_KERNEL + KERNEL,
    LAUNCH: "    launch(row_grads, rows, order, grad.contiguous(), count, width, maxnreg=24, **sizes)\n"   # a spill
            "    jitted(wide_kernel)[(1,)](row_grads, NUMBERS=16384, num_warps=1)\n"}   # a spill


@needs_tool
@needs_ledger
@pytest.mark.all
def test_mistakes_that_a_walk_without_graphs_finds(tmp_path, cache):
    root = copy_with(tmp_path, EAGER_MISTAKES)
    found = walk(root, cache, "--world=8", "--graphs=none", "--first-stage")
    failures = failures_of(found)
    expect(failures, "spill", "add_rows_kernel", "wide_kernel")
    expect(failures, "buffer of table size", "spare = [torch.zeros_like", "RowLookup.backward: dense = ")
    expect(failures, "buffer of a gradient's size", "RowLookup.backward: bank = ", "product = product.clone()")
    assert {kind for kind, _ in failures} == {"spill", "buffer of table size", "buffer of a gradient's size"}

    wrong = rehearse.forbidden(dict(worlds={}, eager=rehearse.eager_of(found)))
    waits = [line for line in wrong if "host wait" in line]
    expected = "Executor.forward_backward: print(float(losses.sum()))", "Executor.optim_step: self.fabric.synchronize()"
    for line in expected:
        assert any(line in wait for wait in waits), waits
    assert len(waits) == len(expected)

    old = json.loads(rehearse.LEDGER.read_text())
    grown = rehearse.report(dict(old, worlds={}), dict(worlds={}, eager=rehearse.eager_of(found)))
    more, = (line for line in grown if "stage 1 even step: collectives" in line)
    assert "all_reduce of float32 +1" in more


BREAKS = {"a print": "print(x.sum().item())", "a choice by content": "x = x if x.sum() > 0 else -x"}


@needs_tool
@pytest.mark.all
@pytest.mark.parametrize("name", BREAKS)
def test_a_graph_break(tmp_path, cache, name):
    start = "        x = x0\n"
    root = copy_with(tmp_path, {start: start + f"        {BREAKS[name]}\n"})
    found = walk(root, cache, "--world=8", "--graphs=quick", "--first-stage")
    expect(failures_of(found), "graph break", BREAKS[name])


SPANS = "        return spans_of(values.short_window, values.long_window, longest, values.rotary.attn_scale)\n"
VARLEN = "Varlen.apply(q, k, v, cu_seqlens, span.numbers)"
RECOMPILES = {                           # what is planted, and what is said of it
    "a step's number in a graph": ({
        SPANS: SPANS.replace("attn_scale)", "attn_scale + values.step // 4)"),
        VARLEN: VARLEN.replace("(q,", "(q * span.scale,")}, "span"),
    "a number of documents": ({
        "torch._dynamo.maybe_mark_dynamic(part.cu_seqlens, 1)": "torch._dynamo.mark_static(part.cu_seqlens)"},
        "cu_seqlens")}


@needs_tool
@pytest.mark.all
@pytest.mark.parametrize("name", RECOMPILES)
def test_a_recompile_after_the_warm_up(tmp_path, cache, name):
    changes, said = RECOMPILES[name]
    root = copy_with(tmp_path, changes)
    found = walk(root, cache, "--world=8", "--graphs=trace", "--first-stage")
    expect(failures_of(found), "recompile", "GPT.losses forward, stage 1")
    reasons = [failure["found"] for failure in found["failures"] if failure["kind"] == "recompile"]
    assert all(said in reason for reason in reasons), reasons


GRADIENT = "fp8_product(grad, w.t(), scale * FP8_W_SCALE, native, dtype_y)\n"
LOWERED_MISTAKES = {
    "product_dtype = logits_dtype if native else ctx.accum_dtype": "product_dtype = ctx.accum_dtype",
    GRADIENT: GRADIENT + "        grad_y = grad_y + grad.float() @ w.t().float()\n"}
HOST_MISTAKES = {"pin_memory=True) for x in self.stored))": "pin_memory=False) for x in self.stored))"}


def test_what_mistakes_are_planted_in_is_there():
    """Those of --all, too: a line of the trainer that changes its words takes its mistakes with it."""
    trainer = (ROOT / "train_gpt.py").read_text("utf-8")
    planted = [EAGER_MISTAKES, LOWERED_MISTAKES, HOST_MISTAKES, *(changes for changes, _ in RECOMPILES.values())]
    counts = {text: trainer.count(text) for changes in planted for text in changes}
    assert set(counts.values()) == {1}, counts


@needs_tool
@needs_ledger
@pytest.mark.all
def test_mistakes_that_only_lowered_graphs_show(tmp_path, cache):
    """Two buffers of (tokens, vocabulary) in f32, of a library's product and of a generated kernel, and their bytes."""
    root = copy_with(tmp_path, LOWERED_MISTAKES)
    command = command_of("--quick", root=root)
    done = subprocess.run(command, env=environment_of(cache), capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    for maker in ("aten._scaled_mm", "triton_"):
        assert any("f32 buffer of (tokens, vocabulary): " + maker in line for line in failed), done.stdout
    assert any("growth: W = 8, stage 1 even step: bytes" in line for line in failed), done.stdout
    assert any("growth: W = 8, stage 1 even step: peak_bytes" in line for line in failed), done.stdout


# ------ The ledger ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def ledger() -> dict[str, Any]:
    if not rehearse.LEDGER.exists():
        pytest.skip("no ledger: python tests/rehearse.py --update")
    return json.loads(rehearse.LEDGER.read_text())


def test_sums_are_those_of_the_timelines(ledger):
    assert set(ledger["worlds"]) == {"1", "8"}
    for world in ledger["worlds"].values():
        for phase in world["phases"].values():
            items = list(rehearse.expand(world, phase["timeline"]))
            sums = rehearse.sums_of(ledger["kernels"], items)
            assert {name: phase[name] for name in sums} == sums
    assert rehearse.written(ledger) + "\n" == rehearse.LEDGER.read_text()
    assert not rehearse.forbidden(ledger)


def dearest(ledger: dict[str, Any]) -> str:
    kernels = ledger["kernels"]
    return max(kernels, key=lambda key: kernels[key]["bytes"])


def grown(old: dict[str, Any], new: dict[str, Any], capsys: pytest.CaptureFixture) -> list[str]:
    for world in new["worlds"].values():                                      # sums anew, as after a walk
        for phase in world["phases"].values():
            phase.update(rehearse.sums_of(new["kernels"], list(rehearse.expand(world, phase["timeline"]))))
    found = rehearse.report(old, new)
    capsys.readouterr()
    return found


def test_growth_names_who_grew(ledger, capsys):
    assert grown(ledger, copy.deepcopy(ledger), capsys) == []

    heavier = copy.deepcopy(ledger)
    kernel = heavier["kernels"][dearest(ledger)]
    kernel["bytes"] *= 2
    found = grown(ledger, heavier, capsys)
    assert any("bytes" in line and kernel["name"] in line for line in found)

    more = copy.deepcopy(ledger)
    phase = more["worlds"]["8"]["phases"]["stage 1 even step"]
    phase["timeline"].append(["run", dearest(ledger), 40])
    found = grown(ledger, more, capsys)
    assert any("stage 1 even step: launches" in line and kernel["name"] in line for line in found)

    larger = copy.deepcopy(ledger)
    phase = larger["worlds"]["8"]["phases"]["stage 2 odd step"]
    buffer = next(iter(phase["at_peak"]))
    phase["at_peak"][buffer][1] *= 2
    phase["peak_bytes"] = int(1.03 * phase["peak_bytes"])
    found = grown(ledger, larger, capsys)
    assert len(found) == 1 and "stage 2 odd step: peak_bytes" in found[0] and buffer in found[0]


def test_growth_of_attention_names_attention(ledger, capsys):
    longer = copy.deepcopy(ledger)
    for kernel in longer["kernels"].values():
        if kernel["kind"] == "attention":
            kernel["flops"] *= 2
    found = grown(ledger, longer, capsys)
    assert found
    for line in found:
        culprits = line.splitlines()[1:]
        assert "flops attention" in line and all("attention_" in who for who in culprits)


def test_growth_of_two_percent_passes(ledger, capsys):
    larger = copy.deepcopy(ledger)
    phase = larger["worlds"]["8"]["phases"]["stage 2 odd step"]
    phase["peak_bytes"] = int(1.02 * phase["peak_bytes"])
    assert grown(ledger, larger, capsys) == []


def test_only_the_lines_that_are_named_may_wait():
    """Another wait in a function that has an allowed one is found."""
    allowed = {line: 3 for line in rehearse.ALLOWED_WAITS}
    world = dict(failures=[], host_waits=allowed | {"Log.flush: print(line.losses.sum().item())": 1})
    found, = rehearse.forbidden(dict(worlds={"8": world}))
    assert "W = 8: host wait: Log.flush: print(line.losses" in found


def test_a_ledger_that_has_no_price_leaves_todays(ledger):
    """What is compared with may be of another format; a table of rates may be damaged."""
    today = dict(ledger, format=rehearse.price.FORMAT, steps={})
    page = rehearse.prices(dict(today, format=0), today)
    assert "Prediction for" in page and "no price of the ledger before" in page and "format 0" in page


def test_damaged_rates_cost_a_price_and_no_walk(ledger, monkeypatch, tmp_path):
    monkeypatch.setattr(rehearse.price, "RATES", tmp_path / "rates.json")
    (tmp_path / "rates.json").write_text("{")
    assert "no price" in rehearse.prices(None, ledger)


def test_repetitions_fold_and_expand():
    items = [["run", name, 1] for name in "abababccccd"]
    world = dict(segments={})
    folded = rehearse.folded(items)
    assert len(folded) < len(items)
    assert list(rehearse.expand(world, folded)) == items


# ------ The command, with walks that are made up ----------------------------------------------------------------------

def walked(launches: int = 10, graph: str = "a", collectives: int = 1, **changes: Any) -> dict[str, Any]:
    """What walk.py says of one stage of one step."""
    timeline = [["run", "mm", launches]]
    timeline += [["collective", 1, "all_reduce", 4000, "bfloat16", "nccl"]] * collectives
    phase = dict(timeline=timeline, peak_bytes=100, at_peak={}, saved_bytes=10, saved={})
    kernels = dict(mm=dict(kind="generated", name="triton_poi_fused", bytes=10**6, registers=32, spills=0))
    return dict(kernels=kernels, graphs={"GPT.losses forward, stage 1": dict(hash=graph, nodes=1)},
                phases={"stage 1 even step": phase}, owned={}, owned_bytes=1000, host_waits={}, failures=[],
                seconds=1.0, steps={"stage 1": dict(even=7, odd=0)}) | changes


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """command(found, *flags): status and text of a call whose walks all find this. Its ledger is command.ledger."""
    def call(found: dict[str, Any], *flags: str, lowered: dict[str, Any] | None = None) -> tuple[int, str]:
        def walks(jobs, of_trainer):
            call.jobs.append(jobs)
            known = lowered if lowered and "8" in jobs else found
            return {name: copy.deepcopy(known) for name in jobs}

        call.jobs = []
        monkeypatch.setattr(rehearse, "walk_all", walks)
        status = rehearse.main([f"--ledger={call.ledger}", *flags])
        return status, capsys.readouterr().out

    monkeypatch.setattr(rehearse, "why_not", str)
    call.ledger = tmp_path / "ledger.json"
    return call


FORBIDDEN = {                            # kind -> what a walk says of it
    "spill": dict(failures=[dict(kind="spill", where="triton_red", found="16 bytes")]),
    "recompile": dict(failures=[dict(kind="recompile", where="GPT.losses", found="reach")]),
    "host wait": dict(host_waits={"Executor.optim_step: x.item()": 2})}


def test_an_update_writes_what_the_next_call_finds_unchanged(command):
    assert command(walked(), "--update")[0] == 0
    ledger = json.loads(command.ledger.read_text())
    assert set(ledger["worlds"]) == {"8", "1"} and ledger["steps"] == walked()["steps"]
    status, said = command(walked())
    assert status == 0 and "FAILED" not in said and "->" not in said
    assert "Prediction for H100" in said


def test_growth_fails_until_an_update_accepts_it(command):
    command(walked(), "--update")
    before = command.ledger.read_text()
    status, said = command(walked(launches=11))
    assert status == 1 and "FAILED  growth: W = 8, stage 1 even step: launches 10 -> 11" in said
    assert command.ledger.read_text() == before

    status, said = command(walked(launches=11), "--update")
    assert status == 0 and "growth: W = 8, stage 1 even step: launches 10 -> 11" in said
    assert command(walked(launches=11))[0] == 0


def test_spills_of_configurations_that_are_not_launched_are_told(command):
    """A card may choose them by their times."""
    found = walked()
    found["kernels"]["mm"]["others"] = [dict(registers=64, spills=16), dict(registers=32, spills=0)]
    status, said = command(found)
    assert status == 0 and "1 kernels compiled, 0 spill" in said
    assert "2 other configurations of them, which a card may choose: 1 spill, at most 16 bytes" in said


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_an_update_accepts_nothing_but_growth(command, kind):
    command(walked(), "--update")
    before = command.ledger.read_text()
    for flags in ([], ["--update"]):
        status, said = command(walked(**FORBIDDEN[kind]), *flags)
        assert status == 1 and f"FAILED  W = 8: {kind}: " in said
    assert command.ledger.read_text() == before


def test_the_quick_part_lowers_only_a_graph_that_has_changed(command):
    command(walked(), "--update")
    assert command(walked(), "--quick")[0] == 0
    assert [set(jobs) for jobs in command.jobs] == [{rehearse.EAGER}]
    status, said = command(walked(graph="b"), "--quick", lowered=walked(launches=11))
    assert status == 1 and "FAILED  growth: W = 8, stage 1 even step: launches" in said
    assert [set(jobs) for jobs in command.jobs] == [{rehearse.EAGER}, {"8"}]


def test_the_quick_part_counts_collectives_and_waits(command):
    command(walked(), "--update")
    status, said = command(walked(collectives=2), "--quick")
    assert status == 1 and "FAILED  growth: W = 8 without graphs, stage 1 even step: collectives 1 -> 2" in said
    status, said = command(walked(**FORBIDDEN["host wait"]), "--quick")
    assert status == 1 and "FAILED  W = 8 without graphs: host wait: Executor.optim_step" in said


def test_a_walk_that_could_not_be_made_is_the_result(command):
    """As on a card on which the estimate refuses the preset."""
    status, said = command(dict(error="memory: 22.8 GiB to use"), "--update", "--card=4090")
    assert status == 1 and "8 on 4090:\nmemory: 22.8 GiB to use" in said and not command.ledger.exists()


@pytest.mark.parametrize("versions, said", [
    (dict(torch="2.12.1+cpu", triton="3.7.1"), "torch 2.12.1+cpu"),
    (dict(torch="2.13.0+cpu", triton="3.8.0"), "triton 3.8.0"),
    (dict(torch="2.13.0+cu130", triton="3.7.1"), "install its CPU wheel")])
def test_another_torch_or_triton_is_skipped_aloud(monkeypatch, capsys, versions, said):
    monkeypatch.setattr(rehearse.shutil, "which", str)
    monkeypatch.setattr(rehearse.importlib.metadata, "version", versions.get)
    assert rehearse.main([]) == 0
    skipped = capsys.readouterr().out
    assert "the rehearsal is skipped" in skipped and said in skipped


def test_without_a_compiler_it_is_skipped_aloud(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no compiler"))
    assert rehearse.main([]) == 0
    assert "no C++ compiler" in capsys.readouterr().out


# ------ Requests that cannot be met, which say so before anything is walked -------------------------------------------

EMPTY = dict(card="H100", flags=[], kernels={}, worlds={"8": {}, "1": {}})


@pytest.fixture
def no_walk(monkeypatch):
    monkeypatch.setattr(rehearse, "why_not", str)
    monkeypatch.setattr(rehearse, "walk_all", None)


@pytest.mark.parametrize("flags", [["--gpus=8"], ["--card=H200"], ["--stages=1"], ["--", "--seed=1"]])
def test_an_update_that_would_lose_what_the_ledger_has_is_refused(no_walk, tmp_path, capsys, flags):
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps(EMPTY))
    assert rehearse.main(["--update", f"--ledger={path}", *flags]) == 2
    assert "H100, W = 8 and 1, all stages, no flags" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--gpus=", "--gpus=0", "--gpus=8,", "--gpus=eight", "--stages=0", "--stages=1-2",
                                  "--card=H99", "--quick --update"])
def test_flags_that_mean_nothing_are_refused(no_walk, capsys, flag):
    with pytest.raises(SystemExit) as ended:
        rehearse.main(flag.split())
    assert ended.value.code == 2
    assert flag.partition("=")[0].partition(" ")[0] in capsys.readouterr().err


@pytest.mark.parametrize("content, said", [("{", "a JSON file"), ("[]", "a list"), ("{}", "no card, flags, kernels")])
def test_a_damaged_ledger_is_refused(no_walk, tmp_path, capsys, content, said):
    path = tmp_path / "ledger.json"
    path.write_text(content)
    assert rehearse.main([f"--ledger={path}"]) == 2
    assert said in capsys.readouterr().out


def test_the_quick_part_needs_a_ledger_of_its_card(no_walk, tmp_path, capsys):
    path = tmp_path / "ledger.json"
    assert rehearse.main(["--quick", f"--ledger={path}"]) == 2
    path.write_text(json.dumps(EMPTY))
    assert rehearse.main(["--quick", f"--ledger={path}", "--card=B200"]) == 2
    assert capsys.readouterr().out.count("nothing to compare with") == 2


@needs_tool
@pytest.mark.all
def test_a_walk_that_cannot_start_says_why(tmp_path, cache):
    root = copy_with(tmp_path, {})
    for flags, said in ((["--stages=9"], "some of 1,2,3,4"), (["--", "--preset=tinyy"], "--preset"),
                        (["--card=4090"], "--num_slots=")):
        assert said in walk(root, cache, "--world=8", *flags)["error"]


@needs_tool
@pytest.mark.all
def test_a_preset_of_short_documents_can_be_walked(tmp_path, cache):
    root = copy_with(tmp_path, {})
    found = walk(root, cache, "--world=8", "--graphs=none", "--", "--preset=tiny", "--dtype=bfloat16")
    assert not found["failures"] and "validation final" in found["phases"] and "checkpoint" in found["phases"]


HOST_TABLE = ["--graphs=none", "--first-stage", "--", "--preset=tiny", "--dtype=bfloat16",
              "--tables=trigram_embed 3 1000 stream 0 host"]


def waits_elsewhere(found: dict[str, Any]) -> set[str]:
    """Lines of the trainer at which another thread than the training one waits for the card, without their comments."""
    return {where.partition("  ")[0] for where in found["waits_elsewhere"]}


@needs_tool
@pytest.mark.all
@pytest.mark.parametrize("world", [1, 8])
def test_a_table_on_the_host_is_not_waited_for(tmp_path, cache, world):
    """Its rows come and go on a thread and a stream of their own; the training thread waits for its losses alone."""
    found = walk(copy_with(tmp_path, {}), cache, f"--world={world}", *HOST_TABLE)
    assert "ended_by" not in found
    waits = {where.partition(":")[0] for where in found["host_waits"]}
    assert waits == {"Clock.start", "Clock.stop", "Log.flush"}
    assert waits_elsewhere(found) == {"HostHome._bring_down: self.stream.synchronize()"}


@needs_tool
@pytest.mark.all
def test_copies_of_a_table_that_wait_are_found(tmp_path, cache):
    root = copy_with(tmp_path, HOST_MISTAKES)
    waits = waits_elsewhere(walk(root, cache, "--world=1", *HOST_TABLE))
    assert "HostHome._bring_down: out.copy_(x, non_blocking=True)" in waits
    assert any(where.startswith("RowState.to") for where in waits)

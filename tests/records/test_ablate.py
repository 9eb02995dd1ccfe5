"""Ablations: every patch applies and switches off what it says; runs resume, stop early, fail and read n/a.

The patches are checked on patched copies of train_gpt.py, imported beside the original, on tiny tensors; the verb
with a trainer of a few lines that writes logs and no more.
"""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from common import own_rows

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "records"))

import train_gpt as tg
from tools import ablate, launch, logs

PATCHED = [name for name, arm in ablate.ARMS.items() if arm.flags is None]
TRAINER = """
import json, os, re, sys
class Config:
    runs: int = 1
flags = dict(x.removeprefix("--").split("=", 1) for x in sys.argv[1:])
first, runs = int(flags["seed"]), int(flags.get("runs", 1))
stages = [dict(batch_tokens=n, short_window=1, long_window=3, lr_mul=1.5, mtp_start=[1.0, 0.5], mtp_end=[1.0, 0.0])
          for n in (128, 256, 384)]
with open({calls!r}, "a") as calls:
    calls.write(f"{{flags.get('arm', 'baseline')}} {{first}}" + f"+{{runs}}" * (runs > 1) + "\\n")
for seed in range(first, first + runs):
    loss = 3 + 0.1 * seed + float(flags.get("worse", 0)) * (1 + 0.01 * seed)
    ms = 100.0 + float(flags.get("slower", 0)) + {more_ms}
    folder = "logs/run" + f"/seed_{{seed}}" * (runs > 1)
    os.makedirs(folder)
    with open(folder + "/log.jsonl", "w") as log:
        say = lambda kind, **facts: print(json.dumps(dict(type=kind, **facts)), file=log)
        say("header", config=dict(num_scheduled_steps=2, num_extension_steps=0, stages=stages, runs=runs), seed=seed,
            flags=flags)
        for step in (1, 2):
            say("step", step=step, train_time_ms=step * ms / 2, tokens=step, train_loss=loss + 1 / step)
        if "bad" in flags:
            say("aborted", step=2, cause="training loss of step 2\\n  found:    nan")
            sys.exit(1)
        say("val", step=2, val_loss=loss, train_time_ms=ms)
        say("result", val_loss=loss, train_time_ms=ms, steps=2, peak_memory_mib=dict(consumption=100 + seed),
            comms=dict(embed=dict(bytes_sent=2_000_000)))
"""


# ------ patches ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """name -> a copy of the trainer with that patch."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: ablate.patched(ROOT / "train_gpt.py", ablate.ARMS[name], folder / name) for name in PATCHED}


def load(path: Path, name: str) -> ModuleType:
    """Import a patched trainer. Its operator gets a name of its own: to register one twice breaks the first."""
    apart = path.with_name("apart.py")
    apart.write_text(path.read_text("utf-8").replace('"train_gpt::', f'"ablated_{name}::'), "utf-8")
    spec = importlib.util.spec_from_file_location(f"ablated_{name}", apart)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                                           # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules(copies):
    return {name: load(path, name) for name, path in copies.items()}


@pytest.mark.house
def test_every_file_is_an_arm():
    assert sorted(path.stem for path in ablate.PATCHES.glob("*.patch")) == sorted(PATCHED)


@pytest.mark.house
@pytest.mark.parametrize("name", PATCHED)
def test_a_patch_says_what_it_does_and_has_one_place(name):
    text, source = (ablate.PATCHES / f"{name}.patch").read_text(), (ROOT / "train_gpt.py").read_text()
    head, *hunks = re.split(r"^@@.*@@\n", text, flags=re.M)
    assert re.match(r"No \w.*: .+\.\n--- a/train_gpt.py\n\+\+\+ b/train_gpt.py\n$", head), head
    for hunk in hunks:
        before = "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] in " -")
        assert source.count(before) == 1, f"not one place for:\n{before}"


@pytest.mark.house
@pytest.mark.parametrize("name", PATCHED)
def test_a_patch_applies_where_lines_have_moved(name, tmp_path):
    moved = tmp_path / "train_gpt.py"
    moved.write_text("# another line\n" * 50 + (ROOT / "train_gpt.py").read_text())
    source = ablate.patched(moved, ablate.ARMS[name], tmp_path / "copy").read_text()
    assert source != moved.read_text()
    compile(source, name, "exec")


@pytest.mark.house
def test_a_patch_applies_inside_a_repository(tmp_path):
    """git would look for the file at the root of a repository around it."""
    import subprocess
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    copy = ablate.patched(ROOT / "train_gpt.py", ablate.ARMS["backout"], tmp_path / "logs" / "sources" / "backout")
    assert "kept[BACKOUT]" not in copy.read_text()


@pytest.mark.house
def test_a_patch_that_no_longer_applies_is_named(tmp_path):
    stale = tmp_path / "train_gpt.py"
    stale.write_text((ROOT / "train_gpt.py").read_text().replace("kept[BACKOUT])", "kept[BACKOUT])  # moved on"))
    with pytest.raises(logs.ToolError, match=r"(?s)patch backout\.patch.*patch does not apply.*--arms"):
        ablate.patched(stale, ablate.ARMS["backout"], tmp_path / "copy")


# ------ each technique is off ----------------------------------------------------------------------------------------
def config(module: ModuleType):
    cfg = module.Config(**module.PRESETS["tiny"] | dict(
        num_heads=4, head_dim=8, model_dim=32, dtype="float64", window_block=3, max_doc_len=12))
    header = [module.ShardHeader("shard", 1, 60, 59)]
    return module.resolve(cfg, header, header)


def random_model(module: ModuleType):
    """A model in which every term counts: gates open, no table at zero, no two scalars alike."""
    cfg, generator = config(module), torch.Generator().manual_seed(1)
    model = module.GPT(cfg, module.attention_reference, 64, {})
    model.set_rotary(module.rotary_by_stage(cfg)[0].frequencies)
    with torch.no_grad():
        for row in model.table.values():
            model.get_parameter(row.label).copy_(torch.randn(row.shape, generator=generator) * 0.3 + 0.1)
    return model


def batch_of(module: ModuleType, tokens: torch.Tensor):
    tables = {table.label: torch.from_numpy(table.ids(tokens.numpy())) for table in module.row_tables(config(module))}
    ends = torch.tensor([[0, tokens.shape[1]]], dtype=torch.int32)
    return module.Batch(0, {}, tokens, tokens.long(), ends, tables)


def hidden(module: ModuleType, model=None) -> torch.Tensor:
    tokens = torch.arange(16, dtype=torch.int32)[None] * 3
    model = model or random_model(module)
    return model.hidden(batch_of(module, tokens), module.spans_of(6, 12, 16, 0.3), own_rows(model))


def with_scalar(module: ModuleType, name: str, value: float):
    model, at = random_model(module), 0
    for label, size in model.scalar_sizes.items():
        if label == name:
            model.scalars.data[at:at + size] = value
        at += size
    return model


def labels(module: ModuleType) -> set[str]:
    return {row.label for row in module.parameter_table(config(module))}


GONE = {"smear": {"smear_gate"}, "skip": {"skip_gate"}, "value_embeddings": {"value_embed", "ve_gate_bank"},
        "bigram": {"bigram_embed"}, "attention_gates": {"attn_gate_bank"}, "x0_mix": {"x0_lambdas"}}


@pytest.mark.house
@pytest.mark.parametrize("name", PATCHED)
def test_parameters_that_leave(name, modules):
    module = modules[name]
    assert labels(tg) - labels(module) == GONE.get(name, set()) and labels(module) <= labels(tg)
    alike = {row.label for row in module.parameter_table(config(module)) if not (row.parts or row.rows)}
    assert set(module.REDUCE_ORDER) == set(module.UPDATE_ORDER) == {module.SMALL} | labels(module) - alike
    rows = {row.label: row.shape for row in module.parameter_table(config(module))}
    assert rows == {row.label: row.shape for row in tg.parameter_table(config(tg)) if row.label in rows}
    assert {field.name for field in vars(module)["fields"](module.Config)} == {f.name for f in tg.fields(tg.Config)}


@pytest.mark.house
@pytest.mark.parametrize("name", ["smear", "skip", "backout", "bigram"])
def test_a_scalar_without_effect(name, modules):
    for module, same in ((tg, False), (modules[name], True)):
        low, high = (hidden(module, with_scalar(module, name, value)) for value in (0.1, 2.0))
        assert torch.equal(low, high) == same, name


@pytest.mark.house
def test_smear_an_input_is_its_token_alone(modules):
    inputs = {}
    for module in (tg, modules["smear"]):
        model = with_scalar(module, "smear", 1.0)
        for first in (3, 9):
            batch = batch_of(module, torch.tensor([[first, 5, 7, 11]], dtype=torch.int32))
            scalars = dict.fromkeys(model.scalar_sizes, torch.ones(1, dtype=torch.float64))
            inputs[module, first] = model.inputs(batch, scalars, own_rows(model))[0]
    off = modules["smear"]
    assert not torch.equal(inputs[tg, 3][:, 1], inputs[tg, 9][:, 1])
    assert torch.equal(inputs[off, 3][:, 1:], inputs[off, 9][:, 1:])


@pytest.mark.house
def test_layers(modules):
    """What the layer table says, and that a patch of it changes nothing else."""
    def facts(layers):
        return tuple(map(dataclasses.astuple, layers))

    for name, change in (("skip", lambda layer: dict(add="")), ("value_embeddings", lambda layer: dict(value=None)),
                         ("key_offset", lambda layer: dict(key_shift=False)),
                         ("paired_heads", lambda layer: dict(attention=layer.attention.replace("paired", "plain")))):
        wanted = tuple(tg.replace(layer, **change(layer)) for layer in tg.LAYERS)
        assert facts(wanted) == facts(modules[name].LAYERS) != facts(tg.LAYERS), name
    assert modules["value_embeddings"].NUM_VALUE_TABLES == 0
    assert [table.label for table in modules["value_embeddings"].row_tables(config(tg))] == ["bigram_embed", "embed"]
    assert [table.label for table in modules["bigram"].row_tables(config(tg))] == ["value_embed", "embed"]


def same_weights(module: ModuleType):
    """A model of the patched trainer with the unpatched one's weights, and that one."""
    whole, other = random_model(tg), random_model(module)
    other.load_state_dict({name: x for name, x in whole.state_dict().items() if name in other.state_dict()})
    return whole, other


@pytest.mark.house
def test_attention_gates_are_those_of_zero_weights(modules):
    whole, ungated = same_weights(modules["attention_gates"])
    whole.attn_gate_bank.data.zero_()
    torch.testing.assert_close(hidden(modules["attention_gates"], ungated), hidden(tg, whole))


@pytest.mark.house
def test_x0_mix_is_that_of_zero_weights(modules):
    whole, unmixed = same_weights(modules["x0_mix"])
    whole.x0_lambdas.data.zero_()
    torch.testing.assert_close(hidden(modules["x0_mix"], unmixed), hidden(tg, whole))


@pytest.mark.house
@pytest.mark.parametrize("precision", ["plain", "emulated"])
def test_softcap_loss_and_gradient_are_the_plain_cross_entropy(modules, precision):
    """In fp8 to the rounding of its numbers, which have three bits below the first, gradients two."""
    module, generator = modules["softcap"], torch.Generator().manual_seed(0)
    y, w = (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((6, 5), (5, 9)))
    y.requires_grad_()
    w.requires_grad_()
    targets, weight = torch.tensor([[1, 3, 0, 8, 2, 4]]), torch.ones((), dtype=torch.float64)
    loss = module.HeadLoss.apply(y, w, targets, torch.ones(1, dtype=torch.float64), weight, precision, torch.float64,
                                 module.as_part(w))
    plain = torch.nn.functional.cross_entropy(y @ w, targets[0], reduction="none")
    torch.testing.assert_close(module.next_token_losses(y, w, targets[0]), plain)
    close = {} if precision == "plain" else dict(rtol=0.2, atol=0.1)
    torch.testing.assert_close(loss, plain, **close)
    for mine, reference in zip(torch.autograd.grad(loss.sum(), (y, w)), torch.autograd.grad(plain.sum(), (y, w))):
        torch.testing.assert_close(mine, reference, **close)


@pytest.mark.house
def test_schedules(modules):
    schedule, plain = (module.Schedule(config(module)) for module in (modules["yarn"], tg))
    assert len(set(plain.rotary)) == len(schedule.rotary) == 4 and len(set(schedule.rotary)) == 1
    assert tuple(schedule.rotary[0]) == tuple(plain.rotary[0])


@pytest.mark.house
def test_decay_ignores_the_update(modules):
    module, one = modules["cautious_decay"], torch.ones((), dtype=torch.float64)
    p, update = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([0.5, -0.5], dtype=torch.float64)
    bank, grad = torch.ones(1, 2, 2, dtype=torch.float64), torch.diag(update)[None]
    for source, decayed in ((tg, [True, False]), (module, [True, True])):
        moved = source.cautious_adam(p, update, 0.1 * one)
        assert ((moved - (p - update)).abs() > 0.01).tolist() == decayed
        results = []
        for decay in (0.0, 0.1):
            results.append(bank.clone())
            state = torch.zeros_like(bank), torch.zeros_like(bank[..., :1])
            source.normuon_update(results[-1], None, grad, *state, 1.0, 0 * one, one, bank[..., :1], decay * one, 0.95)
        undecayed, found = results
        assert torch.diag((found - undecayed)[0].abs() > 0.01).tolist() == decayed
        weights, m, v = p.clone(), torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        source.adam_update(weights, update, m, v, 1.0, (0.0, 0.0), 1e-10, 0.01 * one, 0.1 * one)
        assert ((weights - (p - 0.01 * update.sign())).abs() > 0.01).tolist() == decayed


@pytest.mark.house
def test_normuon_is_muon(modules):
    grad = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = {}
    for module in (tg, modules["normuon_second_moment"]):
        state = torch.zeros_like(grad), torch.rand(2, 6, 1, generator=torch.Generator().manual_seed(1)).double()
        found[module] = module.normuon_direction(grad, *state, torch.tensor(0.9), 0.95, torch.float64)
    muon = tg.polar_express(grad * (1 - 0.9) + grad * (1 - 0.9) * 0.9)
    torch.testing.assert_close(found[modules["normuon_second_moment"]], muon, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found[tg], muon, rtol=1e-2)
    torch.testing.assert_close(found[tg].norm(dim=(1, 2)), muon.norm(dim=(1, 2)), rtol=1e-6, atol=1e-6)


@pytest.mark.house
def test_flags(tmp_path):
    """Each flag arm, as the trainer parses it for `pocket`; nothing else changes."""
    preset = tg.Config(**tg.PRESETS["pocket"])
    stages = json.loads(json.dumps([stage._asdict() for stage in preset.stages]))      # as a header has them
    changed = {}
    for name, arm in ablate.ARMS.items():
        if arm.flags:
            flags = arm.flags(stages) if callable(arm.flags) else arm.flags
            _, cfg = tg.parse_flags(["--preset=pocket", *flags])
            changed[name] = {key: value for key, value in vars(cfg).items() if value != getattr(preset, key)}
    assert {name: set(fields) for name, fields in changed.items()} == {
        "multi_token_loss": {"stages"}, "batch_schedule": {"stages"}, "untying": {"stages"},
        "momentum_warmup": {"momentum_warmup_steps"},
        "weight_decay": {"normuon_weight_decay", "adam_weight_decay"}, "fp8_head": set()}      # the preset has plain
    assert changed["multi_token_loss"]["stages"] == tuple(
        stage._replace(mtp_start=(1.0,), mtp_end=(1.0,)) for stage in preset.stages)
    mean = sum(stage.batch_tokens for stage in preset.stages[:-1]) // 3
    assert changed["batch_schedule"]["stages"] == tuple(stage._replace(batch_tokens=mean) for stage in preset.stages)
    tied, plain = tg.Schedule(tg.replace(preset, **changed["untying"])), tg.Schedule(preset)
    steps = range(plain.total_steps + 1)
    assert all(tied.at(step).tied and not tied.at(step).untie for step in steps)
    assert sum(plain.at(step).untie for step in steps) == 1
    schedule = tg.Schedule(tg.replace(preset, momentum_warmup_steps=0))
    assert schedule.at(0).momentum == preset.momentum_max > tg.Schedule(preset).at(0).momentum


# ------ the verb -----------------------------------------------------------------------------------------------------
@pytest.fixture
def fake(tmp_path, monkeypatch):
    """(run the verb with these settings -> rows, calls of the trainer so far)"""
    script, calls = tmp_path / "train_gpt.py", tmp_path / "calls"
    script.write_text(TRAINER.format(calls=str(calls), more_ms="0.0"))
    flags = dict(a=["--arm=a", "--worse=0.02"], b=["--arm=b", "--worse=-0.01"], same=["--arm=same"],
                 bad=["--arm=bad", "--bad=1"], hopeless=["--arm=hopeless", "--worse=1"])
    arms = [ablate.ARMS[ablate.BASELINE], *(ablate.Arm(name, "", given) for name, given in flags.items())]
    monkeypatch.setattr(ablate, "ARMS", {arm.name: arm for arm in arms})
    monkeypatch.setattr(ablate, "SHORT", [])

    def run(*settings: str, capsys=None) -> list[dict]:
        assert ablate.main([f"--script={script}", f"--out={tmp_path / 'out'}", *settings]) == 0
        assert (tmp_path / "out" / "table.md").read_text().startswith("| without")
        return {row["arm"]: row for row in json.loads(capsys.readouterr().out)} if capsys else {}
    return run, lambda: calls.read_text().split("\n")[:-1]


def test_order_and_resuming(fake):
    run, calls = fake
    run("--arms=a,b")
    assert calls() == ["baseline 0", "a 0", "b 0", "baseline 0", "baseline 1", "b 1", "a 1", "baseline 1"]
    run("--arms=a,b")
    assert len(calls()) == 8
    run("--arms=a,b", "--more=b:3")
    assert calls()[8:] == ["baseline 2", "b 2", "baseline 2"]


def test_seeds_that_share_a_warm_up(fake, capsys, tmp_path):
    """Two seeds a process: losses as if alone, times by process, so that one round has none with an interval."""
    run, calls = fake
    alone = run("--arms=a,b", "--json", capsys=capsys)
    (tmp_path / "out").rename(tmp_path / "alone")
    rows = run("--arms=a,b", "--more=b:3", "--together=2", "--json", capsys=capsys)
    assert calls()[8:] == ["baseline 0+2", "a 0+2", "b 0+2", "baseline 0+2", "baseline 2", "b 2", "baseline 2"]
    assert rows["a"]["n"] == 2 and rows["b"]["n"] == 3 and alone["a"]["n"] == 2
    assert rows["a"]["loss"][0] == pytest.approx(alone["a"]["loss"][0])
    assert len(rows["a"]["time"]) == len(rows["b"]["time"]) == 3
    run("--arms=a,b", "--more=b:3", "--together=2")
    assert len(calls()) == 15 and capsys.readouterr().out
    with pytest.raises(logs.ToolError, match="another --out"):
        run("--arms=a,b")

    (tmp_path / "out").rename(tmp_path / "three")
    rows = run("--arms=a,b", "--together=2", "--json", capsys=capsys)
    assert rows["a"]["time"] == [] and len(rows["a"]["loss"]) == 3 and rows["baseline"]["time"] == [pytest.approx(50)]


def test_a_trainer_without_runs_runs_one_by_one(fake, capsys, tmp_path):
    run, calls = fake
    script = tmp_path / "train_gpt.py"
    script.write_text(script.read_text().replace("    runs: int = 1", "    pass"))
    run("--arms=a", "--together=2")
    assert calls() == ["baseline 0", "baseline 1", "a 0", "a 1", "baseline 0", "baseline 1"]


def test_runs_of_one_process_are_one_time(tmp_path):
    """Seeds 0 and 1 ran together, 2 and 3 too: two processes an arm, and the paired t-test of their mean times."""
    from scipy import stats
    noise = {("baseline", 0): 0.1, ("baseline", 2): -0.2, ("smear", 0): 5.3, ("smear", 2): 5.1}
    runs = []
    for (arm, first), more in noise.items():
        for seed in (first, first + 1):
            path = tmp_path / f"{arm}_{first}/seed_{seed}/log.jsonl"
            run = logs.Run(path, "ours", total=2, facts={"config": {"runs": 2}}, seed=seed,
                           val=[logs.Point(2, 3.0 + seed + more, 0.1 + more / 1000)])
            runs.append((arm, seed, run))
    found = ablate.measured(runs)
    test = stats.ttest_rel([math.log(105.3), math.log(105.1)], [math.log(100.1), math.log(99.8)])
    low, high = test.confidence_interval(0.99)
    expected = [100 * math.expm1(x) for x in ((low + high) / 2, low, high)]
    assert found["smear"]["time"] == pytest.approx(expected)
    assert found["baseline"]["time"] == [pytest.approx(math.sqrt(100.1 * 99.8) / 2)]


def test_no_per_cent_without_an_interval(fake, capsys, tmp_path):
    run, _ = fake
    rows = run("--arms=a,b", "--seeds=1", "--json", capsys=capsys)
    assert rows["a"]["time"] == [] and rows["a"]["loss"] == [pytest.approx(0.02)]
    table = (tmp_path / "out/table.md").read_text()
    assert re.search(r"^\| a +\| flags \| 1 \| 0\.02 +\| n/a +\|", table, re.M)


def test_a_limit_that_fits_the_machine(fake, capsys, tmp_path):
    run, _ = fake
    run("--arms=a")
    first, *rest = [json.loads(line) for line in (tmp_path / "out/manifest.jsonl").read_text().splitlines()
                    if '"end"' in line]
    assert first["limit"] == launch.FIRST_LIMIT_S
    assert rest[0]["limit"] == pytest.approx(3 * first["wall_s"] + 60)
    assert "5 runs left, about" in capsys.readouterr().err


def test_na_failed_hopeless(fake, capsys):
    run, calls = fake
    rows = run("--json", capsys=capsys)
    assert sorted(calls()) == sorted(["baseline 0", "baseline 1"] * 2 + ["a 0", "a 1", "b 0", "b 1", "same 0", "bad 0",
                                                                        "hopeless 0"])
    assert rows["same"]["loss"] == rows["same"]["time"] == [] and "n/a" in rows["same"]["note"]
    assert rows["bad"]["n"] == 0 and rows["bad"]["note"] == "failed: training loss of step 2 found: nan"
    assert rows["hopeless"]["n"] == 1 and rows["hopeless"]["loss"][0] == pytest.approx(1)
    assert f"over {ablate.HOPELESS} nats" in rows["hopeless"]["note"]
    assert rows["a"]["n"] == 2 and rows["a"]["loss"][0] == pytest.approx(0.0201)
    assert rows["b"]["loss"][0] == pytest.approx(-0.01005)                    # better without it: shown like any other
    assert rows["baseline"] | {"loss": 0} == dict(arm="baseline", lines="", n=2, note="", loss=0,
                                                  time=[pytest.approx(50)], memory=[100.5], sent=[2.0])


@pytest.mark.parametrize("outcome, cause, again", [
    ("failed", "exit status 1", []), ("interrupted", "interrupted", ["a 0"]), ("lost", "the tool was killed", ["a 0"])])
def test_only_runs_that_ended_by_themselves_count(fake, tmp_path, outcome, cause, again):
    run, calls = fake
    run("--arms=a", "--seeds=1")
    manifest = tmp_path / "out" / "manifest.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    lines = [line | dict(outcome=outcome, cause=cause) if line["type"] == "end" and line["arm"] == "a" else line
             for line in lines]
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("--arms=a", "--seeds=1")
    assert calls()[3:] == again


def test_what_was_cut_off_or_changed_runs_again(fake, tmp_path):
    run, calls = fake
    manifest = tmp_path / "out" / "manifest.jsonl"
    run("--arms=a", "--seeds=1", "--limit=30")
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    for line in lines:
        if line["type"] == "end" and line["arm"] == "a":
            line |= dict(outcome="failed", cause="still running after the limit of 30 s")
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("--arms=a", "--seeds=1", "--limit=30")
    assert len(calls()) == 3
    run("--arms=a", "--seeds=1", "--limit=40")
    assert calls()[3:] == ["a 0"]
    with pytest.raises(logs.ToolError, match="another --out"):
        run("--arms=a", "--seeds=1", "--", "--other=1")


def test_a_baseline_that_fails_ends_it(fake):
    run, calls = fake
    with pytest.raises(logs.ToolError, match=r"(?s)baseline_seed0.*found: nan.*--limit"):
        run("--arms=a", "--", "--bad=1")
    assert calls() == ["baseline 0"]
    with pytest.raises(logs.ToolError, match="baseline_seed0"):               # it may have been the machine: once more
        run("--arms=a", "--", "--bad=1")
    assert len(calls()) == 2


def test_unknown_arms_and_the_list(fake, capsys, monkeypatch):
    run, calls = fake
    for settings in (["--arms=nothing"], ["--arms=baseline"], ["--arms=a", "--more=b:4"], ["--seeds=0"],
                     ["--script=nowhere.py"], ["--limit=nan"], ["--limit=-1"]):
        with pytest.raises(logs.ToolError, match="--list"):
            run(*settings)
    with pytest.raises(SystemExit, match="2"):
        run("--more=b")
    monkeypatch.undo()
    assert ablate.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"| {name} " in shown for name in list(ablate.ARMS)[1:])
    assert re.search(r"\| backout +\| \+1 -1 +\|", shown)


# ------ statistics ---------------------------------------------------------------------------------------------------
def test_one_arm_is_the_paired_t_test():
    from scipy import stats
    base, arm = [3.1, 3.4, 2.9, 3.3], [3.3, 3.5, 3.2, 3.4]
    cells = {("baseline", k): x for k, x in enumerate(base)} | {("smear", k): x for k, x in enumerate(arm)}
    test = stats.ttest_rel(arm, base)
    assert ablate.differences(cells)["smear"] == pytest.approx([0.175, *test.confidence_interval(0.99)])


def test_too_few_runs_have_no_interval():
    assert ablate.differences({("baseline", 0): 3.0, ("smear", 0): 3.5}) == {"baseline": [3.0], "smear": [0.5]}


@pytest.mark.parametrize("draws", [40, pytest.param(400, marks=pytest.mark.all)])
def test_intervals_cover(draws):
    """18 arms with 2 seeds (one has 1, one 4) that differ ten times as much as the noise: 99 % of intervals hold."""
    import numpy as np
    rng, outside, names = np.random.default_rng(0), 0, list(ablate.ARMS)[:19]
    for _ in range(draws):
        luck, worth = 0.2 * rng.standard_normal(4), 0.05 * rng.standard_normal(19)
        worth[0] = 0
        cells = {(name, seed): 3 + worth[k] + luck[seed] + 0.02 * rng.standard_normal()
                 for k, name in enumerate(names) for seed in range({0: 4, 1: 1, 2: 4}.get(k, 2))}
        found = ablate.differences(cells)
        outside += sum(not low <= worth[names.index(name)] <= high for name, (_, low, high) in
                       ((name, x) for name, x in found.items() if name != "baseline"))
    assert outside <= draws * 18 * 0.01 + 4 * math.sqrt(draws * 18 * 0.01 * 4), outside      # arms share a baseline

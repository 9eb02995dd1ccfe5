"""Records: `new` makes them, `check` finds each kind of damage, `table` keeps classes apart. No torch, made-up runs."""
import contextlib
import hashlib
import io
import json
import math
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "records"))

from tools import layout, logs, shelf  # noqa: E402  (records/ has to be on the path first)

SOURCE = "".join(f"line_{n} = {n}\n" for n in range(40))
FACTS = dict(params_total=1000, params_per_token=700, table_rows={"bigram_embed": 500, "embed": 100}, table_bytes=2400,
             untimed_warmup_steps=16)
CONFIG = dict(num_scheduled_steps=10, num_extension_steps=0, vocab_size=100, val_tokens=65_536, lr=0.1)
RACE = dict(world_size=8, config={"val_tokens": 10_485_760})
LOSSES, SECONDS = (2.171, 2.144, 2.162), (99.1, 97.7, 95.7)


def make_run(folder: Path, seed: int, loss: float, seconds: float, source=SOURCE, config={}, result={}, **header):
    """A run directory of ours; None in `header` leaves a key out."""
    folder.mkdir(parents=True)
    (folder / "train_gpt.py").write_text(source)
    header = dict(type="header", config=CONFIG | {"seed": seed, "run_dir": str(folder)} | config, seed=seed,
                  source_sha256=hashlib.sha256(source.encode()).hexdigest(), data_sha256="d" * 64, hardware="a CPU",
                  world_size=1, torch="2.13", cuda=None, python="3.11", git_commit="c" * 40, changed={},
                  **FACTS) | header
    steps = [dict(type="step", step=n, train_time_ms=round(100 * seconds * n - 1 / (n + seed + loss), 3),
                  train_loss=5 - n / 4 + loss / 100 + seed / 1000) for n in range(1, 11)]
    lines = [{key: fact for key, fact in header.items() if fact is not None},
             dict(type="phase", name="warm-up", ms=5000.0, timed=False),
             dict(type="val", step=0, val_loss=7.6, train_time_ms=0.0), *steps,
             dict(type="val", step=10, val_loss=loss, train_time_ms=1000 * seconds),
             dict(type="result", val_loss=loss, train_time_ms=1000 * seconds, steps=10, tokens=563_200,
                  peak_memory_mib={"consumption": 800}) | result]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_text_log(folder)
    return folder


def write_text_log(folder: Path) -> None:
    """log.txt of the events in log.jsonl, as the trainer would have written it."""
    header, *events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    said = ["=" * 100, f"Running Python {header.get('python')}",
            f"Running PyTorch {header['torch']} compiled for CUDA {header['cuda'] if 'cuda' in header else None} on "
            f"{header['hardware']} with world_size {header['world_size']}",
            f"preset pocket, {header.get('params_total', 0):,} parameters in float32, attention reference, head plain, "
            f"1 micro-batches a step, seed {header['seed']}", "changed from the preset: nothing", "=" * 100]
    for event in events:
        ms = event.get("train_time_ms")
        if event["type"] in ("step", "val"):
            loss = f"val_loss:{event['val_loss']:.4f} " if event["type"] == "val" else ""
            average = ms / max(event["step"], 1)
            said.append(f"step:{event['step']}/10 {loss}train_time:{ms:.0f}ms step_avg:{average:.2f}ms")
        elif event["type"] == "result":
            said.append(f"training time {ms / 1000:.2f} s, {event['steps']} steps, {event['tokens']:,} tokens; "
                        f"logs in {event.get('run_dir', 'somewhere')}")
            said.append("peak memory consumption: 800 MiB")
    (folder / "log.txt").write_text("\n".join(said) + "\n")


def make_runs(folder: Path, losses=LOSSES, seconds=SECONDS, **facts) -> Path:
    for seed, (loss, s) in enumerate(zip(losses, seconds)):
        make_run(folder / f"seed{seed}", seed, loss, s, **facts)
    return folder


def call(*argv) -> tuple[int, str]:
    """Status and stdout of a verb."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = shelf.main(list(map(str, argv)))
    return status, out.getvalue()


def new(root: Path, *argv) -> Path:
    return Path(call("new", "--records", root, *argv)[1].strip())


def check(root: Path, *argv) -> str:
    """What check finds, "" for nothing."""
    status, out = call("check", "--records", root, *argv)
    assert status == int("all numbers follow from their logs" not in out)
    return out if status else ""


def read(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture
def root(tmp_path):
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


@pytest.fixture(scope="module")
def shelf_of_two(tmp_path_factory):
    """An entry, and a comparison with the entry as parent and with another source on one side."""
    place = tmp_path_factory.mktemp("shelf")
    (root := place / "records").mkdir()
    new(root, "First", make_runs(place / "runs"), "--track=pocket", "--date=2026-01-01")
    new(root, "Second", f"a={make_runs(place / 'a', config={'lr': 0.2})}",
        f"b={make_runs(place / 'b', source=SOURCE.replace('= 7', '= 8'), seconds=(90.1, 89.7, 90.7))}",
        "--kind=comparison", "--parent=01", "--date=2026-01-02")
    (root / "README.md").write_text("[one](2026-01-01_01_First/README.md) and `[no link](here)`\n")
    (place / "README.md").write_text("[all](records/README.md#rules) and [web](https://example.org)\n")
    assert check(root) == ""
    return place


@pytest.fixture
def copy(shelf_of_two, tmp_path):
    return Path(shutil.copytree(shelf_of_two, tmp_path / "copy")) / "records"


def entry(root: Path) -> Path:
    return root / "2026-01-01_01_First"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# ------------------------------------------------------------------------------------------------ what a record has

def test_records_of_this_repository():
    status, out = call("check")
    assert not status, out


def test_numbers_are_those_of_the_logs(shelf_of_two):
    result = read(entry(shelf_of_two / "records"))
    mean = sum(LOSSES) / 3
    group = result["groups"][""]
    assert group["losses"] == list(LOSSES) and group["times"] == list(SECONDS)
    assert math.isclose(group["loss"]["mean"], mean, rel_tol=1e-8)
    assert math.isclose(group["loss"]["sd"], math.sqrt(sum((x - mean) ** 2 for x in LOSSES) / 2), rel_tol=1e-8)
    assert result["class"] == "plain" and result["entry"]["tokens_trained"] == 563_200
    text = (entry(shelf_of_two / "records") / "README.md").read_text()
    assert "losses = [2.171, 2.144, 2.162]" in text and "times = [99.1, 97.7, 95.7]" in text


def test_lists_are_in_the_form_of_the_public_records(root, tmp_path):
    """The README's lists, read as those of a public record are, give the runs' losses and times."""
    runs = make_runs(tmp_path / "runs", losses=(3.271, 3.282), seconds=(80.5, 81.5))
    page = new(root, "Lists", runs, "--kind=comparison") / "README.md"
    lists = logs.read([page]).runs
    assert [(run.family, run.loss, run.seconds) for run in lists] == [("R", 3.271, 80.5), ("R", 3.282, 81.5)]


def p_below(xs, target: float) -> float:
    """One-sided p of a t-test, by Simpson's rule over the density of Student's t: no statistics library."""
    n, mean = len(xs), sum(xs) / len(xs)
    sd = math.sqrt(sum((x - mean) ** 2 for x in xs) / (n - 1))
    t, free = (mean - target) / (sd / math.sqrt(n)), n - 1
    scale = math.gamma((free + 1) / 2) / math.sqrt(free * math.pi) / math.gamma(free / 2)
    density = [scale * (1 + (t * k / 4000) ** 2 / free) ** (-(free + 1) / 2) for k in range(4001)]
    simpson = density[0] + density[-1] + 4 * sum(density[1::2]) + 2 * sum(density[2:-1:2])
    return 0.5 + t / 4000 / 3 * simpson


def test_p_value_against_the_target(root, tmp_path):
    losses = (3.2771, 3.2790, 3.2762, 3.2783, 3.2775)
    make_runs(tmp_path / "runs", losses, (80.1, 80.2, 80.0, 80.3, 80.1), **RACE)
    folder = new(root, "Race", tmp_path / "runs", "--track=8xGPU")
    result = read(folder)
    assert math.isclose(result["groups"][""]["p"], p_below(losses, 3.28), rel_tol=1e-6)
    assert f"{p_below(losses, 3.28):.2g}" in (folder / "README.md").read_text()


def test_repeated_seed_adds_a_time_and_no_loss(root, tmp_path):
    make_runs(tmp_path / "runs")
    make_run(tmp_path / "runs" / "seed2_again", 2, 2.164, 96.0)
    group = read(new(root, "Again", tmp_path / "runs", "--track=pocket"))["groups"][""]
    assert len(group["times"]) == 4 and group["loss"]["n"] == 3 and math.isclose(group["losses"][-1], 2.163)


def test_other_source_and_settings_are_shown(shelf_of_two):
    folder = shelf_of_two / "records/2026-01-02_02_Second"
    result = read(folder)
    assert result["changed"] == {"lr": [0.1, 0.2]} and result["stated"]["base"] == "a"
    assert "+line_7 = 8" in (folder / "sources/b.diff").read_text() and (folder / "source.diff").read_text() == ""
    assert set(result["verdicts"]) == {"b"} and not list(folder.glob("logs/**/*.py"))


def test_update_keeps_what_was_written_by_hand(copy):
    edit(entry(copy) / "README.md", "The idea:\n", "The idea: **mine**\n")
    assert check(copy) == ""
    edit(entry(copy) / "README.md", "| 2.159 ", "| 2.158 ")
    assert "README.md: found" in check(copy)
    call("new", "--records", copy, "--update", "First")
    assert check(copy) == "" and "**mine**" in (entry(copy) / "README.md").read_text()


def test_failed_runs_of_a_manifest_are_listed(root, tmp_path):
    out = tmp_path / "out"
    make_runs(out / "runs")
    (out / "runs/seed1").rename(out / "runs/seed1_try2")
    causes = {"seed0": None, "seed1": "no memory", "seed1_try2": None, "seed2": None}
    ends = [dict(type="end", run=n, folder=f"runs/{name}", outcome="failed" if cause else "done", cause=cause)
            for n, (name, cause) in enumerate(causes.items())]
    write_manifest(out, *ends)
    folder = new(root, "Pool", out, "--track=pocket")
    assert "no memory" in (folder / "README.md").read_text() and check(root, "Pool") == ""
    with pytest.raises(logs.ToolError, match="seed2 is done and left out"):
        new(root, "Chosen", out / "runs/seed0", out / "runs/seed1_try2", "--track=pocket")


def write_manifest(out: Path, *lines: dict) -> None:
    (out / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_ablation(root, tmp_path):
    """Arms by patch and by flag, an arm that changes nothing, a run that failed; two baselines a seed."""
    out, ends = tmp_path / "out", []
    other = SOURCE.replace("= 7", "= 8")
    arms = [("baseline", 0.0, 100.0, {}), ("baseline_end", 0.0, 100.2, {}), ("smear", 0.02, 99.0, {"source": other}),
            ("decay", -0.01, 100.0, {"config": {"lr": 0.0}}), ("nothing", 0.0, 100.1, {"config": {"head": "plain"}})]
    for seed in (0, 1):
        for name, more, s, facts in arms:
            loss = 3 + seed / 50 + more + 0.001 * seed * (more > 0)
            make_run(out / f"runs/{name}_{seed}/logs/x", seed, loss, s, **facts)
            ends.append(dict(type="end", run=len(ends), folder=f"runs/{name}_{seed}", arm=name.split("_")[0], seed=seed,
                             outcome="done", cause=None))
    failed = dict(type="end", run=99, folder="runs/yarn_0", arm="yarn", seed=0, outcome="failed", cause="nan")
    write_manifest(out, *ends, failed)
    folder = new(root, "Ablation", out, "--kind=ablation")
    found = read(folder)["arms"]
    assert math.isclose(found["smear"]["loss"][0], 0.0205) and math.isclose(found["decay"]["loss"][0], -0.01)
    low, high = found["smear"]["loss"][1:]
    assert low < 0.0205 < high < 0.1
    percent = 100 * (99 / math.sqrt(100 * 100.2) - 1)
    assert math.isclose(found["smear"]["time"][0], percent, rel_tol=1e-8)
    assert found["decay"]["changed"] == {"lr": [0.1, 0.0]} and "loss" not in found["nothing"]
    text = (folder / "README.md").read_text()
    assert "[smear](sources/smear.diff)" in text and f"| {percent:.4g} (" in text and "| nan " in text
    assert check(root, "Ablation") == ""
    edit(folder / "README.md", "0.0205 (", "0.0105 (")
    assert "README.md: found" in check(root, "Ablation")


def test_seeds_of_one_process_keep_their_folders(root, tmp_path):
    """As `ablate --together=2` leaves them: one line of the manifest for two logs."""
    out, ends = tmp_path / "out", []
    for arm, more, source in (("baseline", 0.0, SOURCE), ("smear", 0.02, SOURCE.replace("= 7", "= 8"))):
        for first in (0, 2):
            for seed in (first, first + 1):
                make_run(out / f"runs/{arm}_seed{first}/logs/x/seed_{seed}", seed, 3 + seed / 50 + more,
                         100 + more + seed / 9, source=source, config={"runs": 2})
            ends.append(dict(type="end", run=len(ends), folder=f"runs/{arm}_seed{first}", arm=arm, seed=first, runs=2,
                             outcome="done", cause=None))
    write_manifest(out, *ends)
    folder = new(root, "Together", out, "--kind=ablation")
    assert (folder / "logs/runs/smear_seed2/seed_3/log.jsonl").exists() and check(root, "Together") == ""
    found = read(folder)["arms"]["smear"]
    assert len(read(folder)["groups"]["smear"]["losses"]) == 4 and len(found["time"]) == 3


def test_a_page_that_differs_throughout_is_not_printed_whole(copy):
    page = entry(copy) / "README.md"
    page.write_text(page.read_text().replace("|", "/"))
    found = [line for line in check(copy, "First").splitlines() if "README.md" in line]
    assert len(found) == shelf.SHOWN_LINES + 1 and "more such lines" in found[-1]


def test_bench_is_kept_and_computed_again(copy, tmp_path):
    out, ends = tmp_path / "bench", []
    for pair in (1, 2, 3, 4, 5):
        for side, s in (("A", 100.0 + pair), ("B", 98.0 + 0.99 * pair)):
            name = f"runs/{len(ends) + 1:03}_{side}"
            make_run(out / f"{name}/logs/x", pair, 3 + pair / 100, s, source=f"{SOURCE}# {side}\n")
            ends.append(dict(type="end", run=len(ends), folder=name, side=side, pair=pair, outcome="done", seed=pair,
                             logs=["logs/x/log.jsonl"]))
        ends.append(dict(type="pair", pair=pair, a_s=100.0 + pair, b_s=98.0 + 0.99 * pair))
    failed = dict(type="end", run=99, folder="runs/099_A", side="A", pair=9, outcome="failed")
    write_manifest(out, dict(type="bench"), *ends, failed)
    call("new", "--records", copy, "--update", "02", f"--bench={out}")
    folder = copy / "2026-01-02_02_Second"
    report = read(folder)["bench"]["bench"]
    assert report["pairs"] == 5 and report["verdict"] == "faster" and "pairs" in report["method"]
    assert "[bench](bench)" in (folder / "README.md").read_text() and not list(folder.glob("bench/**/*.py"))
    assert check(copy) == ""
    edit(out / "manifest.jsonl", '"type": "bench"', '"type": "other"')
    with pytest.raises(logs.ToolError, match="another manifest.jsonl in the record"):
        call("new", "--records", copy, "--update", "02", f"--bench={out}")
    assert check(copy) == ""
    edit(folder / "bench/manifest.jsonl", '"a_s": 102.0', '"a_s": 103.0')
    assert "bench/manifest.jsonl: edited" in check(copy, "02")


# ------------------------------------------------------------------------------------------------ what check finds

def edit_result(folder: Path, change) -> None:
    result = read(folder)
    change(result)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")


DAMAGES = {
    "missing log": (lambda f: (f / "logs/seed1/log.jsonl").unlink(), "logs/seed1/log.jsonl: missing"),
    "edited log": (lambda f: edit(f / "logs/seed1/log.jsonl", "2.144", "2.140"), "logs/seed1/log.jsonl: edited"),
    "edited text log": (lambda f: edit(f / "logs/seed1/log.txt", "2.144", "2.140"), "logs/seed1/log.txt: edited"),
    "mixed sources": (lambda f: edit(f / "logs/seed1/log.jsonl", '"source_sha256": "', '"source_sha256": "0'),
                      "mixed source_sha256"),
    "other source": (lambda f: edit(f / "train_gpt.py", "= 7", "= 9"), "does not hash to the source_sha256"),
    "no source": (lambda f: (f / "train_gpt.py").unlink(), "train_gpt.py: missing"),
    "a run left out": (lambda f: edit_result(f, lambda r: r["stated"]["groups"][""].pop()), "seed2 is in no group"),
    "other date": (lambda f: edit_result(f, lambda r: r["stated"].update(date="2026-01-03")), "found this folder name"),
    "no date": (lambda f: f.rename(f.with_name("2026-13-01_01_First")), "found this folder name"),
    "bad name": (lambda f: f.rename(f.with_name("First")), "found this folder name"),
    "other number": (lambda f: f.rename(f.with_name("2026-01-01_03_First")), "found this folder name"),
    "same number": (lambda f: f.rename(f.with_name("2026-01-01_02_First")), "expected a number of its own"),
    "order of dates": (lambda f: f.rename(f.with_name("2026-01-05_01_First")), "no date before that of"),
    "mean": (lambda f: edit(f / "result.json", '"mean": 2.159', '"mean": 2.149'), '"mean": 2.149'),
    "sd": (lambda f: edit(f / "result.json", '"sd": 0.01', '"sd": 0.02'), '"sd": 0.02'),
    "p-value": (lambda f: edit(f / "result.json", '"p": null', '"p": 0.004'), '"p": 0.004'),
    "stated place": (lambda f: edit_result(f, lambda r: r.update({"class": "table"})), '"class": "table"'),
    "number on the page": (lambda f: edit(f / "README.md", "| 97.5 ", "| 96.5 "), "README.md: found '| all"),
    "list on the page": (lambda f: edit(f / "README.md", "99.1,", "98.1,"), "README.md: found 'times"),
    "no page": (lambda f: (f / "README.md").unlink(), "README.md: found 'nothing'"),
    "dead link": (lambda f: edit(f / "README.md", "The idea:", "[idea](idea.md)"), "dead link idea.md"),
    "no plot": (lambda f: (f / "loss.png").unlink(), "dead link loss.png"),
    "no logs": (lambda f: shutil.rmtree(f / "logs"), "logs/seed0/log.jsonl: missing"),
    "no numbers": (lambda f: (f / "result.json").unlink(), "result.json"),
    "broken numbers": (lambda f: (f / "result.json").write_text("{}"), "not as `new` makes it"),
    "a log more": (lambda f: shutil.copytree(f / "logs/seed1", f / "logs/seed3"), "logs/seed3/log.jsonl"),
    "one log twice": (lambda f: shutil.copy(f / "logs/seed0/log.jsonl", f / "logs/seed1"), "the same log as seed0"),
    "links around": (lambda f: edit(f.parent / "README.md", "01_First", "01_Gone"), "dead link 2026-01-01_01_Gone"),
    "links of the project": (lambda f: edit(f.parent.parent / "README.md", "records/", "record/"), "dead link record/"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(copy, damage):
    do, message = DAMAGES[damage]
    do(entry(copy))
    assert message in check(copy)


def test_damage_of_a_second_source_is_named(copy):
    edit(copy / "2026-01-02_02_Second/sources/b.diff", "+line_7 = 8", "+line_7 = 9")
    assert "source of group 'b'" in check(copy, "Second")


def test_parents_change_is_named(copy):
    edit(entry(copy) / "train_gpt.py", "= 7", "= 9")
    assert "source.diff: found 'nothing'" in check(copy, "02")


# ------------------------------------------------------------------------------------------------ what new refuses

@pytest.mark.parametrize("facts, message", [
    (dict(source=SOURCE + "# other\n"), "mixed source_sha256"), (dict(data_sha256="e" * 64), "mixed data_sha256"),
    (dict(hardware="another CPU"), "mixed hardware"), (dict(config={"lr": 0.3}), "mixed lr"),
    (dict(result={"void": "profiled"}), "profiled"),
    (dict(result={"type": "aborted", "step": 3, "cause": "lost"}), "lost"),
    (dict(result={"steps": 9}), "mixed steps"), (dict(result={"tokens": 1000}), "563200 on track pocket"),
    (dict(params_total=None), "--entry params_total=VALUE"),
])
def test_runs_that_do_not_belong_are_refused(root, tmp_path, facts, message):
    make_runs(tmp_path / "runs", LOSSES[:2])
    make_run(tmp_path / "runs" / "odd", 2, 2.1, 90.0, **facts)
    with pytest.raises(logs.ToolError, match=message):
        new(root, "Odd", tmp_path / "runs", "--track=pocket")
    assert shelf.folders(root) == []


def test_duplicates_and_missing_runs_are_refused(root, tmp_path):
    runs = make_runs(tmp_path / "runs")
    shutil.copytree(runs / "seed0", runs / "seed0_copy")
    with pytest.raises(logs.ToolError, match="the same log as seed0"):
        new(root, "Twice", runs, "--track=pocket")
    with pytest.raises(logs.ToolError, match="two runs of one name"):
        new(root, "Twice", runs / "seed0", runs / "seed0", "--track=pocket")
    with pytest.raises(logs.ToolError, match="No such file"):
        new(root, "None", tmp_path / "nowhere", "--track=pocket")
    with pytest.raises(logs.ToolError, match="one of"):
        new(root, "NoTrack", runs / "seed1")


def test_time_budget_is_kept_within_3_percent(root, tmp_path):
    make_runs(tmp_path / "good", seconds=(97.5, 100.0, 102.5), result={"budget_s": 100.0})
    make_runs(tmp_path / "bad", seconds=(96.5, 100.0, 102.5), result={"budget_s": 100.0})
    make_run(tmp_path / "good/odd", 3, 2.1, 99.0, result={"budget_s": 100.0}, config={"num_scheduled_steps": 9})
    new(root, "Good", tmp_path / "good", "--track=budget")
    with pytest.raises(logs.ToolError, match="within 3 %"):
        new(root, "Bad", tmp_path / "bad", "--track=budget")


def test_values_that_no_log_has_are_marked(root, tmp_path):
    make_runs(tmp_path / "runs", params_total=None)
    folder = new(root, "Old", tmp_path / "runs", "--track=pocket", "--entry=params_total=123")
    assert read(folder)["entry"]["params_total"] == 123
    assert "stated, not logged" in (folder / "README.md").read_text() and check(root, "Old") == ""


# ------------------------------------------------------------------------------------------------ the leaderboard

def board(root: Path, track: str) -> dict:
    """By title, the rows of each list; all keys of the JSON are words without blanks."""
    found = json.loads(call("table", "--json", "--records", root)[1])
    assert not [key for key in keys_of(found) if " " in key]
    return {f"class {part['alike']['class']}, {part['alike']}": part["entries"] for part in found[track]}


def keys_of(value) -> list[str]:
    if isinstance(value, list):
        return [key for item in value for key in keys_of(item)]
    if isinstance(value, dict):
        return [*value, *keys_of(list(value.values()))]
    return []


def test_a_folder_without_records_passes_no_check(tmp_path):
    with pytest.raises(logs.ToolError, match="records in .*nowhere"):
        check(tmp_path / "nowhere")


def test_reports_have_short_hashes(root, tmp_path):
    new(root, "One", make_runs(tmp_path / "runs"), "--track=pocket")
    assert f"data_sha256 {'d' * 8}\n" in call("table", "--records", root)[1]
    assert layout.short_hashes({"a": "0f" * 32, "b": "0f" * 20}) == f"{{'a': '0f0f0f0f', 'b': '{'0f' * 20}'}}"
    assert layout.shown(Path.cwd() / "x/y") == "x/y" and layout.shown(Path("/x")) == "/x"


def test_plain_and_table_are_never_ranked_together(root, tmp_path):
    for n, (rows, loss) in enumerate([(1000, 2.30), (1001, 2.10), (500, 2.20)]):
        make_runs(tmp_path / str(n), [loss + x for x in (0, 0.001, 0.002)], table_rows={"bigram_embed": rows})
        new(root, f"Entry{n}", tmp_path / str(n), "--track=pocket")
    boards = board(root, "pocket")
    assert {key.split(",")[0]: [(row["rank"], row["record"]) for row in rows] for key, rows in boards.items()} == {
        "class table": [(1, "02 Entry1")], "class plain": [(1, "03 Entry2"), (2, "01 Entry0")]}
    assert "pocket: by loss" in call("table", "--records", root)[1]


def test_ranks_need_proof(root, tmp_path):
    """By loss p is against the next entry; by time there is no rank without p < 0.01."""
    for n, losses in enumerate([(2.20, 2.21, 2.22), (2.19, 2.20, 2.21), (2.90, 2.91, 2.92)]):
        new(root, f"Loss{n}", make_runs(tmp_path / f"l{n}", losses), "--track=pocket")
    rows = next(iter(board(root, "pocket").values()))
    assert [(row["rank"], row["record"]) for row in rows] == [(1, "02 Loss1"), (2, "01 Loss0"), (3, "03 Loss2")]
    assert rows[0]["p"] > 0.01 > rows[1]["p"] and rows[2]["p"] is None
    for name, losses, s in (("Weak", (3.279, 3.284, 3.276), 70), ("Quick", (3.271, 3.272, 3.273), 75),
                            ("Slow", (3.271, 3.272, 3.274), 79)):
        new(root, name, make_runs(tmp_path / name, losses, (s, s + 0.1, s + 0.2), **RACE), "--track=8xGPU")
    assert [(row["rank"], row["record"]) for row in next(iter(board(root, "8xGPU").values()))] == [
        (None, "04 Weak"), (1, "05 Quick"), (2, "06 Slow")]


def test_a_systems_change_needs_faster_and_no_lower_loss(root, tmp_path):
    losses, quick = (3.279, 3.284, 3.276), SOURCE + "# quick\n"
    before = make_runs(tmp_path / "before", losses, (80.1, 80.0, 80.2), **RACE)
    after = make_runs(tmp_path / "after", losses, (70.1, 70.2, 70.0), source=quick, **RACE)
    for name, *stated in (("Plain",), ("Systems", "--entry=systems=true")):
        new(root, name, after, f"baseline={before}", "--track=8xGPU", *stated)
    rows = next(iter(board(root, "8xGPU").values()))
    assert [(row["rank"], row["record"], row["against_baseline"]) for row in rows] == [
        (None, "01 Plain", "faster"), (1, "02 Systems", "faster")]

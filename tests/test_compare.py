"""`compare`: planted cases with known answers, refusals, what is said, bad input, and the time that it takes."""
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT / "records"))
from tools import compare, logs, verdict
from tools.logs import ToolError

SECONDS, TIME_SD, LOSS, LOSS_SD = 80.0, 0.0008 * 80, 3.2785, 0.0013       # a record race, and what differs in a pool
HEADER = {"type": "header", "world_size": 8, "torch": "2.13.0",
          "hardware": "NVIDIA H100 80GB HBM3 x 8", "data_sha256": "d" * 64, "source_sha256": "5" * 64}
DRAWS = pytest.mark.parametrize("draws", [10, pytest.param(100, marks=pytest.mark.all)])


def write(folder: Path, seed: int, seconds: float, loss: float, ended: float | None = None, phases=(), steps=1000,
          result=(), **header) -> Path:
    """A small log of ours: validation at steps 0, 900 and 1000, ten training losses; its file time is the run's end."""
    folder.mkdir(parents=True)
    config = {"num_scheduled_steps": steps, "seed": seed, "run_dir": str(folder), **header.pop("config", {})}
    lines = [{**HEADER, "seed": seed, **header, "config": config}, *({"type": "phase", **phase} for phase in phases)]
    for share, above in ((0.0, 7.5), (0.9, 0.03), (1.0, 0.0)):
        lines.append({"type": "val", "step": int(share * steps), "val_loss": loss + above,
                      "train_time_ms": 1000 * share * seconds})
    lines += [{"type": "step", "step": k * steps // 10, "train_time_ms": 100 * k * seconds, "train_loss": loss + 1 / k}
              for k in range(1, 11)]
    lines.append({"type": "result", "val_loss": loss, "train_time_ms": 1000 * seconds, "steps": steps,
                  "peak_memory_mib": {"allocated": 30000 + seed}, **dict(result)})
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (ended or 1e9,) * 2)
    return path


def report(folder: Path, **settings) -> dict:
    """What compare says of folder/a against folder/b."""
    return compare.compare(*(compare.side_of(name.upper(), [folder / name]) for name in "ab"), **settings)


def draw(folder: Path, rng, n: int = 8, share: float = 0.0, time=None, loss=None, seed=None, order=None) -> dict:
    """n runs a side, B's times by `share` longer. time(place, rng), loss(side, seed, rng), seed(k): what is planted."""
    place = 0
    for side, k in order or [(side, k) for side in "ab" for k in range(n)]:
        mean = SECONDS * (1 + share * (side == "b"))
        seconds = (time or (lambda place, rng: 0.0))(place, rng) + rng.normal(mean, TIME_SD)
        number = seed(k) if seed else k
        value = loss(side, number, rng) if loss else rng.normal(LOSS, LOSS_SD)
        write(folder / side / f"run_{k:02}", number, seconds, value, 1e9 + 200 * place if order else None)
        place += 1
    return report(folder)


def manifest(folder: Path, order: list[tuple[str, int]], paired: bool = True) -> list[tuple[str, int]]:
    """bench's lines about runs in that order, with a failed run that counts for nothing. Returns the order."""
    lines = [{"type": "bench"}, {"type": "end", "run": 0, "folder": "x", "pair": 99, "side": "A", "outcome": "failed"}]
    lines += [{"type": "end", "run": place + 1, "folder": f"{side}/run_{k:02}", "side": side.upper(), "outcome": "done",
               **({"pair": k + 1} if paired else {})} for place, (side, k) in enumerate(order)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return order


def interleaved(pairs: int) -> list[tuple[str, int]]:
    """A B, B A, ..."""
    return [(side, k) for k in range(pairs) for side in ("ab" if k % 2 == 0 else "ba")]


def words(tmp_path: Path, draws: int, known=None, **planted) -> list[dict]:
    """Reports of as many draws; known: the order of the runs, if a manifest is to tell it."""
    if known:
        planted["order"] = known
        for number in range(draws):
            manifest(tmp_path / str(number), known, paired=False)
    return [draw(tmp_path / str(number), np.random.default_rng([7, number]), **planted) for number in range(draws)]


def wrong(reports: list[dict], *right: str) -> int:
    return sum(found["verdict"] not in right for found in reports)


def allowed(draws: int) -> int:
    """Wrong words that the stated error rate lets pass: its mean over these draws and three standard errors."""
    return math.floor(draws * verdict.ALPHA + 3 * math.sqrt(draws * verdict.ALPHA * (1 - verdict.ALPHA)))


@DRAWS
def test_no_difference(tmp_path, draws):
    found = words(tmp_path, draws)
    assert wrong(found, "same", "undecided") <= allowed(draws)


@DRAWS
@pytest.mark.parametrize("share, sure", [(-0.002, 0.6), (0.002, 0.6), (-0.01, 0.95), (0.01, 0.95)])
def test_true_differences(tmp_path, draws, share, sure):
    right = "faster" if share < 0 else "slower"
    found = words(tmp_path, draws, share=share)
    assert wrong(found, right, "undecided") <= allowed(draws)
    assert wrong(found, right) <= (1 - sure) * draws                      # and it is seen: power


@DRAWS
def test_identical_runs(tmp_path, draws):
    """The same losses for the same seeds: said to be equal, and only the time decides."""
    found = words(tmp_path, draws, loss=lambda side, seed, rng: LOSS + seed / 1000)
    assert wrong(found, "same", "undecided") <= allowed(draws)
    assert all("losses and curves are equal to the last bit on both sides" in "".join(one["notes"]) for one in found)
    assert all(one["loss"] == (0.0, 0.0, 0.0, 1.0) for one in found)


@DRAWS
def test_the_same_seed_repeated_is_one_seed(tmp_path, draws):
    """B's one seed happens to be lucky by 3 sd: eight repeats must not make a result of it."""
    found = words(tmp_path, draws, seed=lambda k: 0, loss=lambda side, seed, rng: LOSS - 3 * LOSS_SD * (side == "b"))
    assert {one["verdict"] for one in found} == {"undecided"} and {one["a"]["seeds"] for one in found} == {1}
    assert all(one["a"]["runs"] == 8 and one["loss"] is None and "seed" in one["reason"] for one in found)
    lucky = {}
    for number in range(draws):                                           # two seeds, four times each
        rng = np.random.default_rng([8, number])
        of_seed = lambda side, seed, rng: lucky.setdefault((number, side, seed), rng.normal(LOSS, LOSS_SD))
        lucky[number] = draw(tmp_path / f"two_{number}", rng, seed=lambda k: k % 2, loss=of_seed)
        assert lucky[number]["a"]["loss"].n == 2 and lucky[number]["a"]["time"].n == 8
    assert wrong([lucky[number] for number in range(draws)], "same", "undecided") <= allowed(draws)


@DRAWS
def test_a_machine_with_two_modes(tmp_path, draws):
    found = words(tmp_path, draws, time=lambda place, rng: 0.012 * SECONDS * rng.integers(2))
    assert wrong(found, "same", "undecided") <= allowed(draws)
    assert sum("fall in two groups" in "".join(one["notes"]) for one in found) >= 0.9 * draws
    few = words(tmp_path / "few", draws, n=3, time=lambda place, rng: 0.012 * SECONDS * rng.integers(2))
    assert wrong(few, "same", "undecided") <= allowed(draws)              # all of A in one mode, all of B in the other


DRIFT = 0.01 * SECONDS                                                    # over the whole series


@DRAWS
@pytest.mark.parametrize("known", [True, False])
def test_a_drifting_machine_without_pairs(tmp_path, draws, known):
    """All of A, then all of B: a drift of 1 % looks like a difference of 0.5 %; it is named and nothing is decided."""
    blocks = [(side, k) for side in "ab" for k in range(8)]
    found = words(tmp_path, draws, blocks if known else None, time=lambda place, rng: DRIFT * place / 15)
    assert wrong(found, "undecided") <= allowed(draws)
    assert sum("times drift by +0.0" in one["reason"] for one in found) >= 0.95 * draws
    slow = words(tmp_path / "slow", draws, blocks, time=lambda place, rng: DRIFT / 5 * place / 15)
    assert wrong(slow, "same", "undecided") <= allowed(draws)             # too slow to be seen, but its order is known


@DRAWS
def test_fewer_steps_for_as_much_loss_are_no_gain(tmp_path, draws):
    """B leaves out 10 of 1,000 steps and loses what they are worth: too little for a test of the losses to see."""
    found = []
    for number in range(draws):
        rng = np.random.default_rng([8, number])
        for side, steps, cost in (("a", 1000, 0.0), ("b", 990, 10 * 0.0003)):
            for k in range(5):
                write(tmp_path / f"{number}/{side}/run_{k}", k, rng.normal(SECONDS * steps / 1000, TIME_SD),
                      rng.normal(LOSS + cost, LOSS_SD), steps=steps)
        found.append(report(tmp_path / str(number)))
    assert wrong(found, "undecided") <= allowed(draws)


@DRAWS
@pytest.mark.parametrize("share, right", [(0.0, "same"), (-0.002, "faster"), (0.002, "slower")])
def test_a_drifting_machine_with_pairs(tmp_path, draws, share, right):
    found = []
    for number in range(draws):
        order = manifest(tmp_path / str(number), interleaved(16))
        found.append(draw(tmp_path / str(number), np.random.default_rng([9, number]), share=share, order=order,
                          time=lambda place, rng: DRIFT * place / 31))
    assert {one["method"] for one in found} == {"16 interleaved pairs"}
    assert wrong(found, right, "undecided") <= allowed(draws)
    assert share == 0 or wrong(found, right) <= 0.3 * draws               # seen through a drift five times as large
    assert "manifest: 1 runs failed, 32 runs done, 32 of them compared" in found[0]["notes"]


def test_pairs_are_tested_by_the_e_value(tmp_path):
    order = manifest(tmp_path, interleaved(6))
    found = draw(tmp_path, np.random.default_rng(1), share=-0.01, order=order)
    times = {key: [run.seconds for run in logs.read([tmp_path / key]).runs] for key in "ab"}
    shares = [b / a - 1 for a, b in zip(times["a"], times["b"])]
    assert found["time"].p == pytest.approx(1 / verdict.paired_e_value(shares))
    assert found["time"].mean == pytest.approx(np.mean(shares) * np.mean(times["a"]))
    assert found["verdict"] == "faster" and found["b"]["time"].n == 6


def pool(folder: Path, side: str, losses, times, **settings) -> None:
    for k, (loss, seconds) in enumerate(zip(losses, times)):
        write(folder / side / f"run_{k}", k, seconds, loss, **settings)


A_LOSSES, A_TIMES = [3.2780, 3.2795, 3.2770, 3.2788, 3.2781], [80.0, 80.1, 79.9, 80.05, 79.95]
B_LOSSES, B_TIMES = [3.2782, 3.2791, 3.2774, 3.2785, 3.2779], [79.0, 79.1, 78.9, 79.05, 78.95]


def test_numbers_of_a_report(tmp_path):
    """Against numpy, and by hand: slope 0.03 in 100 steps and 8 s, so a nat is 266.7 s."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES, target_loss=3.28)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, target_loss=3.28)
    found = report(tmp_path)
    assert found["verdict"] == "faster" and found["target"] == 3.28
    assert found["a"]["loss"] == (5, pytest.approx(np.mean(A_LOSSES)), pytest.approx(np.std(A_LOSSES, ddof=1)))
    assert found["b"]["time"] == (5, pytest.approx(79.0), pytest.approx(np.std(B_TIMES, ddof=1)))
    assert found["time"].mean == pytest.approx(-1) and found["time"].low < -1 < found["time"].high
    assert found["nats_per_step"] == pytest.approx(0.0003) and found["s_per_nat"] == pytest.approx(8 / 0.03)
    apart = np.mean(B_LOSSES) - np.mean(A_LOSSES)
    assert found["equivalent_steps"] == pytest.approx(apart / 0.0003)
    assert [test.mean for test in found["at_equal_loss"]] == pytest.approx([-1 + apart * k * 8 / 0.03 for k in (1, 2)])
    assert found["memory"].mean == 0 and found["a"]["p_target"] == verdict.one_sample(A_LOSSES, 3.28)
    other = report(tmp_path, target=3.2)
    assert other["target"] == 3.2 and other["a"]["runs_for_target"] is None


def test_loss_decides_at_equal_loss(tmp_path):
    """B is 1 s faster but 0.02 nats worse, which is worth 5.3 s and more; and the other way round."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", [loss + 0.02 for loss in B_LOSSES], B_TIMES)
    found = report(tmp_path)
    assert found["verdict"] == "slower" and "at equal loss" in found["reason"] and found["time"].mean < 0
    assert found["parts_at"] == 0
    back = compare.compare(compare.side_of("A", [tmp_path / "b"]), compare.side_of("B", [tmp_path / "a"]))
    assert back["verdict"] == "faster"


def test_curves_part_where_they_part(tmp_path):
    """Equal at step 0 within the seeds, apart from step 900 on; equal seeds differ from the first training loss on."""
    rng = np.random.default_rng(2)
    for side in "ab":
        for seed in range(6):
            loss = LOSS + rng.normal(0, 1e-3) + 0.02 * (side == "b")
            path = write(tmp_path / side / str(seed), seed, 80 + rng.normal(0, 0.05), loss)
            text = path.read_text().splitlines()
            first = json.loads(text[1])
            text[1] = json.dumps({**first, "val_loss": 10.8 + rng.normal(0, 1e-3)})
            path.write_text("\n".join(text) + "\n")
    found = report(tmp_path)
    assert found["parts_at"] == 900 and "part at step 900" in found["curves"]
    assert "equal seeds have equal losses until step 0 (validation)" in found["notes"]


def test_curves_of_training_losses_where_no_validation_is_shared(tmp_path):
    rng = np.random.default_rng(2)
    for side, steps in (("a", 1000), ("b", 2000)):
        for seed in range(4):
            write(tmp_path / side / str(seed), seed, 80.0 + rng.normal(), LOSS + rng.normal(0, 1e-3), steps=steps)
    found = report(tmp_path)
    assert found["parts_at"] == 200 and "mean training curves part at step 200" in found["curves"]


@pytest.mark.parametrize("header, named", [
    ({"hardware": "NVIDIA H200 x 8"}, "hardware"), ({"world_size": 4}, "world_size"), ({"torch": "2.12.0"}, "torch"),
    ({"nccl": "2.1"}, None), ({"git_commit": "abc"}, None)])
def test_other_machines_and_environments(tmp_path, header, named):
    """Refused unless --across, which says what it can hide; a fact that only one side states refuses nothing."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, **header)
    found = report(tmp_path)
    if named is None:
        assert found["verdict"] == "faster" and compare.ACROSS not in report(tmp_path, across=True)["notes"]
        return
    assert found["verdict"] == "not comparable" and named in found["reason"] and found["time"] is None
    assert "--across" in found["reason"] and found["loss"] is not None
    across = report(tmp_path, across=True)
    assert across["verdict"] == "faster" and compare.ACROSS in across["notes"] and named in across["environment"]


def test_other_data_are_not_comparable_at_all(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES, data_sha256="e" * 64)
    for across in (False, True):
        found = report(tmp_path, across=across)
        assert found["verdict"] == "not comparable" and "data" in found["reason"]


@pytest.mark.parametrize("odd, reason", [({"steps": 1200}, "1200"), ({"config": {"adam_lr": 0.1}}, "adam_lr")])
def test_a_side_of_several_recipes_is_not_comparable(tmp_path, odd, reason):
    pool(tmp_path, "a", A_LOSSES, A_TIMES, config={"adam_lr": 0.008})
    pool(tmp_path, "b", B_LOSSES, B_TIMES, config={"adam_lr": 0.008})
    write(tmp_path / "b" / "odd", 9, 79.0, 3.2785, **{"config": {"adam_lr": 0.008}, **odd})
    found = report(tmp_path)
    assert found["verdict"] == "not comparable" and reason in found["reason"]


def test_a_difference_of_settings_between_the_sides_is_shown(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES, config={"row_comms": "dense"})
    pool(tmp_path, "b", B_LOSSES, B_TIMES, config={"row_comms": "sparse"}, source_sha256="6" * 64)
    found = report(tmp_path)
    assert found["config"] == {"row_comms": (["dense"], ["sparse"]), "source_sha256": (["5" * 64], ["6" * 64])}
    assert "row_comms dense -> sparse" in compare.text(found)


def test_the_same_runs_on_both_sides(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", A_LOSSES, A_TIMES)
    assert report(tmp_path)["verdict"] == "not comparable" and "5 runs are on both sides" in report(tmp_path)["reason"]


def test_what_does_not_count_is_listed(tmp_path):
    """Aborted and unfinished runs are no results, a void time is no time, a run that diverged forbids a verdict."""
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES)
    write(tmp_path / "b" / "profiled", 7, 200.0, 3.2780, result={"void": "profiled"})
    for name, last in (("aborted", {"type": "aborted", "step": 3, "cause": "out of memory"}), ("cut", None)):
        path = write(tmp_path / "b" / name, 8, 80.0 + len(name), 3.2780)
        lines = path.read_text().splitlines()[:-1] + ([json.dumps(last)] if last else [])
        path.write_text("\n".join(lines) + "\n")
    found = report(tmp_path)
    assert found["verdict"] == "faster" and found["b"]["runs"] == 6 and found["b"]["time"].n == 5
    aborted, cut = found["b"]["not counted"]
    assert aborted.endswith("aborted: out of memory") and cut.endswith("no result line and no cause")
    assert "profiled" in found["b"]["times do not count"][0]
    write(tmp_path / "b" / "nan", 11, 79.0, math.nan)
    assert report(tmp_path)["verdict"] == "undecided" and "no finite loss" in report(tmp_path)["reason"]


def test_phases_show_work_that_left_the_clock(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES, phases=[{"name": "tables", "ms": 900.0, "timed": True}])
    pool(tmp_path, "b", B_LOSSES, B_TIMES, phases=[{"name": "tables", "ms": 900.0, "timed": False}])
    found = report(tmp_path)
    assert found["phases"] == [{"name": "tables", "timed": True, "a_s": pytest.approx(0.9), "b_s": 0.0},
                               {"name": "tables", "timed": False, "a_s": 0.0, "b_s": pytest.approx(0.9)}]
    assert "phases off the clock: A 0.00 s, B 0.90 s; tables 0.00, 0.90" in compare.text(found)


def test_one_run_a_side_decides_nothing(tmp_path):
    pool(tmp_path, "a", A_LOSSES[:1], A_TIMES[:1])
    pool(tmp_path, "b", B_LOSSES[:1], B_TIMES[:1])
    found = report(tmp_path)
    assert found["verdict"] == "undecided" and "nan" not in compare.text(found)


def test_more_runs_that_would_settle_it(tmp_path):
    pool(tmp_path, "a", A_LOSSES, [80.0, 80.3, 79.7, 80.1, 79.9])
    pool(tmp_path, "b", B_LOSSES, [79.8, 80.1, 79.5, 79.9, 79.7])
    found = report(tmp_path)
    assert found["verdict"] == "undecided" and 10 < found["runs_to_settle"] < 60
    assert f"settled by about {found['runs_to_settle']} runs a side" in compare.text(found)


def peer(folder: Path, name: str, seconds: float, loss: float, total: int = 1400, end: int | None = None) -> None:
    """A log of family D: source with decoys, an environment, timing lines."""
    golden = (GOLDEN / "d_timing.txt").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    step_ms = 1000 * seconds / total
    lines = [f"step:{step}/{total} val_loss:{loss + (total - step) * 2e-4:.4f} train_time:{step_ms * step:.0f}ms "
             f"step_avg:{step_ms:.2f}ms" for step in (0, 1000, 1250, end or total)]
    (folder / name).write_text(golden[:golden.index("step:0/4 val_loss:10.8260")] + "\n".join(lines) + "\n")


def test_logs_of_peers(tmp_path):
    for k, (loss, seconds) in enumerate(zip(A_LOSSES, A_TIMES)):
        peer(tmp_path / "a", f"{k}.txt", seconds, loss)
        peer(tmp_path / "b", f"{k}.txt", seconds - 1, loss + 0.0002)
    (tmp_path / "a" / "README.md").write_text("times = [80.0, 80.1]\n")
    found = report(tmp_path, target=3.28)
    assert found["verdict"] == "faster" and found["a"]["families"] == {"D": 5} and found["a"]["p_target"] < 0.01
    assert found["a"]["not read"] == [f"{tmp_path / 'a' / 'README.md'}: lists of 2 runs in a README: logs count"]
    peer(tmp_path / "a", "cut.txt", 70.0, 3.30, end=1300)
    assert report(tmp_path)["a"]["not counted"] == [f"{tmp_path / 'a' / 'cut.txt'}: stops at 1300 of 1400"]
    for k in range(5):                                                    # all of a side stop early on purpose
        peer(tmp_path / "c" / "a", f"{k}.txt", A_TIMES[k], A_LOSSES[k], end=1300)
        peer(tmp_path / "c" / "b", f"{k}.txt", B_TIMES[k], B_LOSSES[k], end=1300)
    found = report(tmp_path / "c")
    assert found["verdict"] == "faster" and found["a"]["notes"] == ["stops at 1300 of 1400 (5 runs)"]


def test_lists_of_a_readme_are_compared_too(tmp_path):
    (tmp_path / "a.md").write_text(f"losses = {A_LOSSES}\ntimes = {A_TIMES}\n")
    (tmp_path / "b.md").write_text(f"losses = {B_LOSSES}\ntimes = {[t * 1000 for t in B_TIMES]}\n")
    found = compare.compare(*(compare.side_of(name.upper(), [tmp_path / f"{name}.md"]) for name in "ab"))
    assert found["verdict"] == "faster" and "hardware of A is not recorded" in found["notes"]
    found = compare.compare(compare.side_of("A", [GOLDEN / "r_readme"]), compare.side_of("B", [tmp_path / "b.md"]))
    assert found["verdict"] == "not comparable" and "several lists" in found["reason"]


def test_every_golden_family_can_be_a_side():
    paths = [path for path in GOLDEN.iterdir() if path.name != "z_no_logs"]
    for path in paths:
        found = compare.compare(compare.side_of("A", [path]), compare.side_of("B", [GOLDEN / "d_timing.txt"]))
        assert found["verdict"] in ("undecided", "not comparable")
        assert len(compare.text(found).splitlines()) <= 40
        json.dumps(compare.jsonable(found), allow_nan=False)


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(ROOT / "records"), *map(str, arguments)], capture_output=True, text=True)


def test_the_command(tmp_path):
    pool(tmp_path, "a", A_LOSSES, A_TIMES)
    pool(tmp_path, "b", B_LOSSES, B_TIMES)
    done = run("compare", tmp_path / "a", tmp_path / "b", "--target=3.28", "--plot", tmp_path / "p.png")
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) <= 40
    last = done.stdout.splitlines()[-1]
    assert last.startswith("verdict: faster: no difference of losses shows, and B takes 1 s less")
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    done = run("compare", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(done.stdout)
    assert found["verdict"] == "faster" and found["time"]["p"] < 1e-6 and found["a"]["loss"]["n"] == 5


@pytest.mark.parametrize("make, found", [
    (lambda path: path.mkdir(), "no file"), (lambda path: None, "bad"),
    (lambda path: path.write_bytes(bytes(range(256)) * 9), "binary"), (lambda path: path.write_text(""), "empty"),
    (lambda path: path.write_text("step:1/2 val_loss:3.2\n"), "no validation line")])
def test_bad_input_is_status_2_with_a_reason(tmp_path, make, found):
    """Also if the other side can be read."""
    make(tmp_path / "bad")
    for sides in ((tmp_path / "bad", GOLDEN / "d_timing.txt"), (GOLDEN / "d_timing.txt", tmp_path / "bad")):
        with pytest.raises(ToolError, match=found):
            compare.main(list(map(str, sides)))


def test_status_and_help():
    done = run("compare", GOLDEN / "nowhere", GOLDEN / "d_timing.txt")
    assert done.returncode == 2 and done.stdout == "" and "nowhere" in done.stderr and "do:" in done.stderr
    assert run("compare", GOLDEN).returncode == 2 and run("nonsense").returncode == 2 and run().returncode == 2
    done = run("--help")
    assert done.returncode == 0
    assert all(f"\n{verb} " in done.stdout for verb in ("compare", "bench", "ablate", "new", "check", "table"))


def test_plots_with_one_point_without_times_and_of_many_groups(tmp_path):
    """No run of the golden files may break a plot; shelf draws any number of groups."""
    groups = {path.name: logs.read([path]).runs[:1] for path in sorted(GOLDEN.glob("*_*.*")) + [GOLDEN / "i_one"]}
    compare.plot(groups, tmp_path / "p.png")
    compare.plot({"A": groups["a_llmc.log"]}, tmp_path / "q.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000 and (tmp_path / "q.png").stat().st_size > 5_000


@pytest.mark.all
def test_1500_logs_of_160_kB(tmp_path):
    """On one core: 240 MB, 110 kB of source, 1,400 step lines and 7 validations each."""
    golden, rng = (GOLDEN / "d_timing.txt").read_text(), np.random.default_rng(0)
    head = golden[:golden.index("step:0/4 val_loss:10.8260")]
    source = "".join(f"    x_{k} = f(y, print0(f'step:{{step}}/{{total}} val_loss:{{v:.4f}}'))\n" for k in range(1600))
    for number in range(1500):
        step_ms, lines = rng.normal(56, 0.05), []
        for step in range(1401):
            if step % 250 == 0 and step < 1400 or step == 1400:
                loss = 3.278 + (1400 - step) * 1e-3 + rng.normal(0, 1e-3)
                lines.append(f"step:{step}/1400 val_loss:{loss:.4f} train_time:{step * step_ms:.0f}ms step_avg:56.00ms")
            if step < 1400:
                lines.append(f"step:{step + 1}/1400 train_time:{(step + 1) * step_ms:.0f}ms step_avg:56.00ms")
        side = tmp_path / "ab"[number % 2] / str(number // 100)
        side.mkdir(parents=True, exist_ok=True)
        (side / f"{number}.txt").write_text(source + head + "\n".join(lines) + "\n")
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.txt"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("compare", tmp_path / "a", tmp_path / "b", "--target=3.28")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"\n1,500 logs, {size / 1e6:.0f} MB: {seconds:.1f} s of one core")
    assert done.returncode == 0 and 200e6 < size

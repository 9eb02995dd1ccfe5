"""Made-up logs of ours for the tests of `compare`, `show` and `place`."""
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "records"))
from tools import compare

SECONDS = 80.0                                                            # of a record race
TIME_SD = 0.0008 * SECONDS                                                # what differs in a public pool
LOSS = 3.2785
LOSS_SD = 0.0013
NATS_PER_STEP = 0.0003                                                    # near the end of `write`'s curve
NOON = 1_780_000_000 // 86_400 * 86_400 + 43_200                          # of some day
HEADER = {"type": "header", "world_size": 8, "torch": "2.13.0", "hardware": "NVIDIA H100 80GB HBM3 x 8",
          "data_sha256": "d" * 64}
SOURCES = {"a": "5" * 64, "b": "6" * 64}                                  # by the folder of a side
RUN_S = 200                                                               # from one start to the next
A_LOSSES = [3.2780, 3.2795, 3.2770, 3.2788, 3.2781]
A_TIMES = [80.0, 80.1, 79.9, 80.05, 79.95]
B_LOSSES = [3.2782, 3.2791, 3.2774, 3.2785, 3.2779]
B_TIMES = [79.0, 79.12, 78.9, 79.05, 78.95]


def write(folder: Path, seed: int, seconds: float, loss: float, started: float | None = None, phases=(), steps=1000,
          result=(), **header) -> Path:
    """A small log of ours: validation at 0, 90 and 100 % of the steps, ten training losses.
    started  s since 1970: in the name of its run directory, as the trainer gives it; None: not said"""
    folder.mkdir(parents=True)
    run_dir = str(folder)
    if started is not None:
        run_dir = f"logs/{time.strftime('%Y%m%d-%H%M%S', time.gmtime(started))}-pocket-1234abcd"
    config = {"num_scheduled_steps": steps, "seed": seed, "run_dir": run_dir, **header.pop("config", {})}
    source = SOURCES["b" if "b" in folder.parts else "a"]
    lines = [{**HEADER, "source_sha256": source, "seed": seed, **header, "config": config}]
    lines += [{"type": "phase", **phase} for phase in phases]
    for share, above in ((0.0, 7.5), (0.9, 100 * NATS_PER_STEP), (1.0, 0.0)):
        lines.append({"type": "val", "step": int(share * steps), "val_loss": loss + above,
                      "train_time_ms": 1000 * share * seconds})
    for k in range(1, 11):
        lines.append({"type": "step", "step": k * steps // 10, "train_time_ms": 100 * k * seconds,
                      "train_loss": loss + 1 / k})
    lines.append({"type": "result", "val_loss": loss, "train_time_ms": 1000 * seconds, "steps": steps,
                  "peak_memory_mib": {"allocated": 30000 + seed}, **dict(result)})
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def pool(folder: Path, side: str, losses, times, first: float | None = None, apart: float = 2 * RUN_S,
         **settings) -> None:
    """Runs of a side; both sides in turn (a b a b ...) on one day, unless `first` says when they start."""
    if first is None:
        first = NOON + RUN_S * (side == "b")
    for k, (loss, seconds) in enumerate(zip(losses, times)):
        write(folder / side / f"run_{k}", k, seconds, loss, first + k * apart, **settings)


def report(folder: Path, **settings) -> dict:
    """What compare says of folder/a against folder/b."""
    sides = [compare.side_of(name.upper(), [folder / name]) for name in "ab"]
    return compare.compare(*sides, **settings)


def peer(path: Path, seconds: float, loss: float, place: int, source: str = "", total: int = 1400,
         end: int | None = None, day: int = 21, driver: str = "570.195.03") -> None:
    """A log of family D: source with decoys, an environment with a date, validations. place: when it ran, in runs."""
    golden = (ROOT / "tests/records/golden/d_timing.txt").read_text()
    head = golden[:golden.index("step:0/4 val_loss:10.8260")]
    minutes = 4 * place
    head = head.replace("Nov 21 05:00:00 2026", f"Nov {day} {5 + minutes // 60:02}:{minutes % 60:02}:00 2026")
    head = head.replace("570.195.03", driver)
    step_ms = 1000 * seconds / total
    lines = []
    for step in (0, 1000, 1250, end or total):
        lines.append(f"step:{step}/{total} val_loss:{loss + (total - step) * 2e-4:.4f} "
                     f"train_time:{step_ms * step:.0f}ms step_avg:{step_ms:.2f}ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source + head + "\n".join(lines) + "\n")


def peers(folder: Path, end: int | None = None, b_end: int | None = None, **of_b) -> None:
    """Five runs a side in turn; B's may end elsewhere, and be of another day or driver."""
    for k in range(5):
        peer(folder / "a" / f"{k}.txt", A_TIMES[k], A_LOSSES[k], 2 * k, end=end)
        peer(folder / "b" / f"{k}.txt", B_TIMES[k], B_LOSSES[k], 2 * k + 1, "# B\n", end=b_end or end, **of_b)

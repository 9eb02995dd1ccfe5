"""What the tests of the record tools share: synthetic logs of this trainer and of others, and calls of verbs."""
import contextlib
import hashlib
import importlib.util
import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/records/golden"
sys.path.insert(0, str(ROOT / "records"))                     # contains the package `tools`

from tools import files, report                              # noqa: E402

SOURCE = "".join(f"line_{n} = {n}\n" for n in range(40))
OTHER_SOURCE = SOURCE.replace("= 7\n", "= 8\n")
NOON = 1_780_000_000 // 86_400 * 86_400 + 43_200              # noon of a day, s since 1970
RUN_S = 200                                                   # s between the starts of two runs
TARGET = 3.28
A_LOSSES = [3.2780, 3.2795, 3.2770, 3.2788, 3.2781]
B_LOSSES = [3.2782, 3.2791, 3.2774, 3.2785, 3.2779]
NO_FLAGS = {"A": {"flags": []}, "B": {"flags": []}}           # sides of a bench without flags
A_TIMES = [80.0, 80.1, 79.9, 80.05, 79.95]
B_TIMES = [79.0, 79.12, 78.9, 79.05, 78.95]
CONFIG = dict(num_scheduled_steps=10, num_extension_steps=0, vocab_size=100, val_tokens=65_536, lr=0.1, bigram_rows=500)
CPU = dict(hardware="a CPU", world_size=1, all_phases=True)
FACTS = dict(params_total=1000, untimed_warmup_steps=16)
BENCH_START = NOON - 200 * 86_400                             # start of the first run of a bench, s since 1970

def make_run(folder: Path, seed: int, loss: float, seconds: float, started: float | None = None, source: str = SOURCE,
             config: Mapping = {}, result: Mapping = {}, steps: int = 10, all_phases: bool = False,
             **header: object) -> Path:
    """Write a run directory of this trainer, with its source.

    all_phases: log the phases that a run of a record must have, not only the warm-up. header: further facts of the
    header; None leaves a key out. started: s since 1970.
    """
    folder.mkdir(parents=True)
    (folder / "train_gpt.py").write_text(source)
    settings = CONFIG | dict(seed=seed, run_dir=str(folder), num_scheduled_steps=steps) | dict(config)
    facts = dict(type="header", config=settings, seed=seed, source_sha256=sha256(source), data_sha256="d" * 64,
                 hardware="NVIDIA H100 80GB HBM3 x 8", world_size=8, torch="2.13.0", cuda="13.0", python="3.11",
                 changed={}, **FACTS)
    facts |= header
    if started is not None:
        facts["started"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(started))
    lines = [{key: fact for key, fact in facts.items() if fact is not None}]
    phases = {"warm-up": [5000.0]}
    if all_phases:
        phases = {"set-up": [400.0], "warm-up of stage 1": [1200.0, 900.0], **phases, "first batch": [30.0]}
    for name, times in phases.items():
        lines += [dict(type="phase", name=name, ms=ms, timed=name == "first batch") for ms in times]
    validated = range(0, steps, settings["val_every"]) if "val_every" in settings else (steps // 2, steps * 4 // 5)
    lines.append(dict(type="val", step=0, val_loss=7.6, train_time_ms=0.0))
    for n in range(1, steps + 1):
        ms = 1000 * seconds * n / steps - 1 / (n + seed + loss)
        train_loss = 5 - n / steps + loss / 100 + seed / 1000
        lines.append(dict(type="step", step=n, train_time_ms=ms, train_loss_next=train_loss, tokens=56_320 * n))
        if n in validated:
            val_loss = loss + 1 - n / steps
            lines.append(dict(type="val", step=n, val_loss=val_loss, train_time_ms=ms))
    last = dict(val_loss=loss, train_time_ms=1000 * seconds)
    if all_phases:
        lines.append(dict(type="phase", name="evaluation", ms=3000.0, timed=False))
    lines.append(dict(type="val", step=steps, **last))
    facts_at_end = dict(steps=steps, tokens=563_200, peak_memory_mib={"consumption": 800})
    lines.append(dict(type="result", **last) | facts_at_end | dict(result))
    write_events(folder / "log.jsonl", lines)
    form = "step:{step}/10 val_loss:{val_loss:.4f} train_time:{train_time_ms:.0f}ms step_avg:1.00ms\n"
    write_text(folder / "log.txt", "".join(form.format(**line) for line in lines if line["type"] == "val"))
    return folder

def bench_plan(sources: Mapping[str, str], pairs: int) -> dict:
    """Return the first line of a manifest. sources: the source of each side."""
    sides = {name: dict(flags=["--seed={seed}"], source_sha256=sha256(source)) for name, source in sources.items()}
    return dict(type="bench", pairs=pairs, ranks=1, sides=sides)

def make_bench_run(bench: Path, number: int, pair: int, side: str, loss: float, seconds: float, source: str,
                   **settings: object) -> list[dict]:
    """Write a run of a bench, with its pair as seed; return its two lines in the manifest."""
    folder = f"runs/{number:03}_{side}"
    started = BENCH_START + number * RUN_S
    make_run(bench / folder / "logs/x", pair, loss, seconds, started + 2, source, **settings)
    results = dict(val_loss=loss, train_s=1000 * seconds / 1000, wall_s=seconds + 12)
    return manifest_lines(number, pair, side, folder, source, outcome="done", **results)

def manifest_lines(number: int, pair: int, side: str, folder: str, source: str, **ended: object) -> list[dict]:
    facts = dict(run=number, folder=folder, side=side, pair=pair, source_sha256=sha256(source))
    facts["command"] = f"python train_gpt.py --seed={pair}"
    began = time.gmtime(BENCH_START + number * RUN_S)
    start = dict(type="start", time=time.strftime("%Y-%m-%dT%H:%M:%S", began))
    end = dict(type="end", cause="", wall_s=120.0) | ended
    return [facts | start, facts | end]

def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

def events_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in text_of(path).splitlines()]

def write_events(path: Path, events: list[dict]) -> None:
    write_text(path, "".join(json.dumps(event) + "\n" for event in events))

def text_of(path: Path) -> str:
    """Return the text of a file, or of NAME.gz if a record has only that."""
    return files.read_bytes(path).decode()

def write_text(path: Path, text: str) -> None:
    """Write a file, compressed if it is stored so."""
    files.write_bytes(files.stored(path), text.encode())

def make_side(folder: Path, losses: Sequence[float] = A_LOSSES, times: Sequence[float] = A_TIMES,
              first: float = NOON, **settings: object) -> Path:
    """Write a pool of runs; by default the other side's runs fit between them."""
    for seed, (loss, seconds) in enumerate(zip(losses, times)):
        make_run(folder / f"seed{seed}", seed, loss, seconds, first + 2 * RUN_S * seed, **settings)
    return folder

def make_sides(folder: Path, a: Mapping = {}, b: Mapping = {}, bench: bool = True) -> tuple[Path, Path]:
    """Write two sides of a bench in the order ABAB...: B's runs have a different source and take 1 % less time.

    bench: False writes no manifest.
    """
    of_b = dict(losses=B_LOSSES, times=B_TIMES, first=NOON + RUN_S, source=OTHER_SOURCE) | dict(b)
    sides = make_side(folder / "a", **dict(a)), make_side(folder / "b", **of_b)
    if bench:
        pairs = list(zip(*(sorted(side.iterdir()) for side in sides)))
        lines = [dict(type="bench", pairs=len(pairs), sides=NO_FLAGS)]
        for number, run in enumerate((run for pair in pairs for run in pair), 1):
            where = run.relative_to(folder).as_posix()
            lines += manifest_lines(number, (number + 1) // 2, run.parent.name, where, SOURCE, outcome="done")
        write_events(folder / "manifest.jsonl", lines)
    return sides

def compare(a: Path, b: Path, *options: object, **settings: object) -> dict:
    sides = [report.side_of(name, [path]) for name, path in zip("AB", (a, b))]
    return report.compare(*sides, *options, **settings)

def call(*argv: object) -> tuple[int, str, str]:
    """Call a verb; return exit status, stdout and stderr."""
    spec = importlib.util.spec_from_file_location("records_main", ROOT / "records/__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = module.main(list(map(str, argv)))
    return status, out.getvalue(), err.getvalue()

def edit(path: Path, old: str, new: str) -> None:
    """Replace the first occurrence of `old`, which must exist."""
    text = text_of(path)
    assert old in text
    write_text(path, text.replace(old, new, 1))

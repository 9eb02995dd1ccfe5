"""Verbs `new`, `check`, `table`: a record is a folder of logs and pages made from them; check makes every number again.

    python records new NAME RUNS... [--track=pocket] [--kind=comparison] [--parent=01] [--date=...]
    python records new --update RECORD [--bench=DIR]
    python records check [RECORD...]        python records table [--json]
`build` computes result.json from a record's logs and from what was stated when it was made (result["stated"]); `page`
makes the README from result.json. `new` writes both, `check` compares both. A prediction is made from ledgers and a
table of rates instead of runs (prediction.py)."""
from __future__ import annotations

import argparse, datetime, difflib, hashlib, json, math, re, shutil, subprocess, tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tools import ablate, compare, logs, prediction, verdict
from tools.ablate import aligned, interval
from tools.compare import Side
from tools.logs import Run, ToolError

RECORDS = Path(__file__).resolve().parents[1]
FOLDER = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d)_(\w+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MARK = "<!-- end of what is written by hand; what follows is made from the logs -->\n\n"
SOURCE, MANIFEST, DIFF, LOGS = "train_gpt.py", "manifest.jsonl", "source.diff", ("log.jsonl", "log.txt")
MADE = "README.md", "result.json", "loss.png", DIFF
PLAIN_ROWS = 10                    # class plain: no table has more rows than this many times the vocabulary
BUDGET_OFF = 0.03                  # a run that ends further off its time budget is no entry
DIGITS = 9                         # of numbers in result.json: another version of a library may change the last ones
DEPTH = 6                          # folders above a log in which its manifest and its source are looked for
ENTRY = "params_total", "params_per_token", "table_rows", "table_bytes", "tokens_trained", "untimed_warmup_steps"
SHOWN = "seed", "loss", "bits_per_byte", "of_unigram_entropy", "seconds", "steps", "tokens", "memory_mib"
ALIKE = "data_sha256", "hardware", "world_size", "torch", "cuda"             # throughout a record
MACHINE = *ALIKE, "python", "nccl", "triton", "attention", "head", "preset", "git_commit", "budget_s", "val_tokens"

class Track(NamedTuple):
    """The rules that a program can apply; all of them: records/README.md."""
    target: float | None           # the mean final validation loss is to be below, nats per token
    rank: str                      # "seconds" or "loss": the lower the better
    needs: dict[str, Any]          # what each run must have
    alike: tuple[str, ...]         # what entries share that are ranked together, besides the class

TRACKS = {f"{n}xGPU": Track(3.28, "seconds", {"world_size": n, "val_tokens": 10_485_760}, ("hardware", "data_sha256"))
          for n in (8, 1)} | {
    "pocket": Track(None, "loss", {"tokens": 563_200, "val_tokens": 65_536}, ("data_sha256",)),
    "budget": Track(None, "loss", {}, ("hardware", "budget_s", "data_sha256", "val_tokens"))}

def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

def text(path: Path) -> str:
    """As it is, line ends too: hashes and diffs depend on them. A file that is not there is empty."""
    return path.read_bytes().decode("utf-8") if path.is_file() else ""

def lines(manifest: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, text(manifest).splitlines()) if line["type"] == kind]

def load(folder: Path) -> dict[str, Any]:
    try:
        return json.loads(text(folder / "result.json"))
    except ValueError as error:
        raise ToolError(f"{folder.name}/result.json", error, "the numbers of a record", "records new") from None

def folders(root: Path) -> list[Path]:
    """What looks like a record, badly named ones too."""
    return sorted({path.parent for mark in ("*/result.json", "*/logs", "[0-9]*/README.md") for path in root.glob(mark)
                   if path.parent.name[0] != "."})

def find(root: Path, name: str) -> Path:
    """A record by its path, folder name, number or name."""
    fits = [path for path in folders(root) if Path(name).name in (path.name, *path.name.split("_", 2)[1:])]
    if len(fits) != 1:
        raise ToolError(f"record {name}", [path.name for path in fits], "one", "give its folder's name or its number")
    return fits[0]

def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[Any]]:
    """[old, new] of each key that differs; None for what is not there."""
    return {key: [old.get(key), new.get(key)] for key in sorted({*old, *new}) if old.get(key) != new.get(key)}

def hashes(folder: Path) -> dict[str, str]:
    """Of all files of a record that are not made from the others."""
    return {name: sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()
            and (name := path.relative_to(folder).as_posix()) not in MADE}

def unified(old: Path, new: Path) -> str:
    """A diff that `git apply` takes; empty where nothing differs."""
    sides = (text(path).splitlines(keepends=True) for path in (old, new))
    return "".join(difflib.unified_diff(*sides, f"a/{SOURCE}", f"b/{SOURCE}"))

def parent_diff(folder: Path, stated: dict[str, Any]) -> str:
    return unified(folder.parent / stated["parent"] / SOURCE, folder / SOURCE) if stated["parent"] else ""

def source_sha256(folder: Path, group: str) -> str:
    """Of the source of a group: that of the record, changed by its diff where it has one."""
    with tempfile.TemporaryDirectory() as work:
        copy = Path(shutil.copy(folder / SOURCE, work))
        if (diff := folder / f"sources/{group}.diff").exists():
            subprocess.run(["git", "apply", "--whitespace=nowarn", diff], cwd=work, check=True)
        return sha256(copy)

def read_log(path: Path) -> Run:
    try:
        return logs.read_file(path)[0]
    except (OSError, logs.NotALog) as error:
        raise ToolError(f"log {path}", error, "the log of one run", "restore it, or leave it out") from None

def grouped(folder: Path, stated: dict[str, Any]) -> dict[str, Side]:
    """The logs of a record, by group; a prediction has none."""
    if predicts(stated):
        return {}
    return {name: Side(name, [], logs.Reading([read_log(folder / "logs" / run / LOGS[0]) for run in runs], [], []))
            for name, runs in stated["groups"].items()}

def predicts(stated: dict[str, Any]) -> bool:
    """Made from ledgers, without runs."""
    return stated["kind"] == "prediction"

def rounded(result: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(result), parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))

def value(run: Run, key: str) -> Any:
    """A fact of a run, wherever its log states it."""
    return (run.facts["config"] | run.facts | run.result).get("tokens" if key == "tokens_trained" else key)

def in_manifest(log: Path) -> tuple[Path | None, dict[str, Any]]:
    """The manifest above a log, and the line of its run's end."""
    above = log.resolve().parents
    return next(((folder / MANIFEST, line) for folder in above[:DEPTH] for line in lines(folder / MANIFEST, "end")
                 if folder / line["folder"] in above), (None, {}))

def source_of(run: Run) -> Path:
    """The trainer that made a log, beside it or in a folder above."""
    for path in (path for folder in run.path.resolve().parents[:DEPTH] for path in sorted(folder.glob("*.py"))):
        if sha256(path) == run.facts["source_sha256"]:
            return path
    raise ToolError(f"source of {run.path}", "none with its source_sha256", "a trainer", "put it beside the log")

def problems(sides: dict[str, Side], stated: dict[str, Any], folder: Path) -> Iterator[tuple[str, Any, str]]:
    """(what, found, expected): why these runs cannot stand in one record, or cannot be an entry of its track."""
    if predicts(stated):
        yield from prediction.problems(folder, stated)
        return
    read = [run for group in sides.values() for run in group.reading.runs]
    leaf, seen = lambda run: run.path.parent.name, {}
    for run in read:
        if run.void or not run.finished or not math.isfinite(run.loss):
            yield leaf(run), run.void or run.aborted or [run.loss, *run.notes], "a finished run whose clock counts"
        if (same := seen.setdefault(sha256(run.path), run)) is not run:
            yield leaf(run), f"the same log as {leaf(same)}", "each run once"
    for line in lines(folder / "logs" / MANIFEST, "end"):
        if line["outcome"] == "done" and not (folder / "logs" / line["folder"]).exists():
            yield "runs of the manifest", f"{line['folder']} is done and left out", "all that are done"
    for log in {path.parent for path in (folder / "logs").rglob(LOGS[0])} - {run.path.parent for run in read}:
        yield "logs", f"{log.name} is in no group", "each run in a group"
    if stated["kind"] == "ablation" and stated["base"] != ablate.BASELINE:
        yield "groups", [*sides], f"one of them {ablate.BASELINE}"
    own = ["source_sha256", "steps", *sorted({key for run in read for key in compare.config(run)})]
    for where, members, key in [("the record", read, key) for key in ALIKE] + [
            (f"group {name!r}", group.runs, key) for name, group in sides.items() for key in own]:
        found = {json.dumps(value(run, key)): leaf(run) for run in members}
        if len(found) > 1 and (key, stated["track"]) != ("steps", "budget"):
            yield f"mixed {key} in {where}", found, "one"
    yield from misfits(sides, stated) if stated["kind"] == "entry" else ()

def misfits(sides: dict[str, Side], stated: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Which rules of its track an entry breaks, as far as logs can show it."""
    track = TRACKS.get(stated["track"])
    if not track or len(sides) != 1 + bool(stated["base"]):
        yield "entry", f"track {stated['track']}, groups {[*sides]}", f"one of {[*TRACKS]}, one group beside a baseline"
        return
    for run in sides[stated["main"]].runs:
        name, budget = run.path.parent.name, value(run, "budget_s") or math.inf
        if stated["track"] == "budget" and abs(run.seconds / budget - 1) > BUDGET_OFF:
            yield f"{name}, seconds", run.seconds, f"within 3 % of --time_budget ({budget} s)"
        yield from ((f"{name}, {key}", value(run, key), f"{needed} on track {stated['track']}")
                    for key, needed in track.needs.items() if value(run, key) != needed)
        yield from ((f"{name}, {key}", value(run, key), f"logged, else --entry {key}=VALUE, not both")
                    for key in ENTRY if (value(run, key) is None) != (key in stated["entry"]))

def numbers(run: Run) -> dict[str, Any]:
    entropy, memory = value(run, "unigram_nats"), value(run, "peak_memory_mib") or {"": None}
    return {"seed": run.seed, "loss": run.loss, "seconds": run.seconds, "steps": value(run, "steps"),
            "tokens": value(run, "tokens"), "memory_mib": max(memory.values()), "bits_per_byte": value(run, "val_bpb"),
            "of_unigram_entropy": run.loss / entropy if entropy else None, "comms": value(run, "comms") or {},
            "untimed_s": {phase["name"]: phase["ms"] / 1000 for phase in run.phases if not phase["timed"]}}

def pool(group: Side, target: float | None) -> dict[str, Any]:
    """A group: losses by seed (those of a repeated seed are averaged, so n counts seeds), times of all runs."""
    return {"losses": (losses := group.losses()), "times": group.times, "loss": verdict.summary(losses),
            "seconds": verdict.summary(group.times), "p": target and verdict.one_sample(losses, target),
            "source_sha256": value(group.runs[0], "source_sha256")}

def reported(a: Side, b: Side) -> dict[str, Any]:
    report = compare.compare(a, b)
    return {key: report[key] for key in ("verdict", "reason", "loss", "time", "memory", "method", "runs_to_settle")}

def benched(folder: Path) -> dict[str, Any]:
    """The verdict on a bench kept in a record, from the logs of its complete pairs."""
    pairs = {line["pair"] for line in lines(folder / MANIFEST, "pair")}
    ends = [line for line in lines(folder / MANIFEST, "end") if line["outcome"] == "done" and line["pair"] in pairs]
    sides = (compare.side_of(side, [folder / line["folder"] / log for line in ends if line["side"] == side
                                    for log in line["logs"]]) for side in "AB")
    return {"pairs": len(pairs), **reported(*sides)}

def ablated(sides: dict[str, Side]) -> dict[str, dict[str, Any]]:
    """By arm: what its header changes, and its measures."""
    found = ablate.measured([(name, run.seed, run) for name, group in sides.items() for run in group.runs])
    configs = {name: compare.config(group.runs[0]) for name, group in sides.items()}
    return {name: {"changed": changes(configs[ablate.BASELINE], configs[name]), **xs} for name, xs in found.items()}

def build(folder: Path, stated: dict[str, Any], sides: dict[str, Side]) -> dict[str, Any]:
    """result.json of a record."""
    if predicts(stated):
        follows = prediction.build(folder, stated)
        return rounded({"stated": stated, **follows, "files": hashes(folder)})
    first, base, track = sides[stated["main"]].runs[0], sides.get(stated["base"]), TRACKS.get(stated["track"])
    entry = {key: stated["entry"].get(key, value(first, key)) for key in ENTRY}
    rows, config, target = entry["table_rows"], compare.config(first), track and track.target
    old = load(folder.parent / stated["parent"]).get("config", config) if stated["parent"] else config
    ablation = stated["kind"] == "ablation"
    result = compare.jsonable({
        "stated": stated, "target": target, "machine": {key: value(first, key) for key in MACHINE}, "entry": entry,
        "class": rows and ("table" if max(rows.values()) > PLAIN_ROWS * value(first, "vocab_size") else "plain"),
        "groups": {name: pool(group, target) for name, group in sides.items()},
        "runs": {run.path.parent.relative_to(folder / "logs").as_posix(): numbers(run)
                 for group in sides.values() for run in group.reading.runs},
        "verdicts": {name: reported(base, group) for name, group in sides.items()
                     if base and group is not base and not ablation}, "arms": ablated(sides) if ablation else {},
        "bench": {name: benched(folder / name) for name in stated["bench"]}, "config": config,
        "changed": changes(old, config), "files": hashes(folder),
        "unfinished": [line for line in lines(folder / "logs" / MANIFEST, "end") if line["outcome"] != "done"]})
    return rounded(result)

def page(result: dict[str, Any]) -> str:
    """The generated part of a README, from result.json alone."""
    if predicts(result["stated"]):
        return prediction.page(result)
    stated, groups, parent = result["stated"], result["groups"], result["stated"]["parent"]
    track = f" of track `{stated['track']}`, class {result['class']}" if stated["kind"] == "entry" else ""
    pools = [[name or "all", len(x["times"]), len(x["losses"]), x["loss"]["mean"], x["loss"]["sd"],
              x["seconds"]["mean"], x["seconds"]["sd"], x["p"]] for name, x in groups.items()]
    tests = [(name, stated["base"], x) for name, x in result["verdicts"].items()]
    tests += [(f"[{name}]({name}): B", f"A, {x['pairs']} pairs", x) for name, x in result["bench"].items()]
    tests = [[b, a, f"**{x['verdict']}**", *(interval(x[key] and [*x[key].values()][:3]) for key in ("loss", "time")),
              x["reason"]] for b, a, x in tests]
    arms = [[f"[{name}](sources/{name}.diff)" if f"sources/{name}.diff" in result["files"] else name,
             len(groups[name]["losses"]), *(interval(x.get(key)) for key in ablate.MEASURES),
             ", ".join(f"{key}={flag}" for key, (_, flag) in x["changed"].items())]
            for name, x in result["arms"].items()]
    runs = [[f"[{name.split('/')[-1]}](logs/{name}/{LOGS[0]})", *(x[key] for key in SHOWN),
             ", ".join(f"{phase} {s:.1f}" for phase, s in x["untimed_s"].items())]
            for name, x in result["runs"].items()]
    lists = [f"{name}:\n\n" * bool(name) + f"```\nlosses = {[round(x, 6) for x in pool['losses']]}\n"
             f"times = {[round(x, 3) for x in pool['times']]}\n```" for name, pool in groups.items()]
    facts = [[key, json.dumps(x), "stated, not logged" if key in stated["entry"] else "log"]
             for key, x in (result["entry"] | stated["entry"] | result["machine"]).items() if x is not None]
    return "\n\n".join(filter(None, [
        f"## Numbers\n\n{stated['kind'].capitalize()}{track}, {stated['date']}: [source]({SOURCE}), [logs](logs), "
        "[all numbers](result.json)."
        + f" Parent: [{parent}](../{parent}/README.md), [difference of the source]({DIFF})." * bool(parent),
        aligned("group | runs | seeds | final loss | sd | training s | sd | p, mean below the target", pools),
        aligned("without | seeds | loss | ms per step, % | MiB | MB sent | by flags", arms),
        aligned("B | against A | verdict | loss, B - A (99 %) | s, B - A (99 %) | reason", tests),
        aligned(f"run | {' | '.join(SHOWN)} | untimed s", runs), *lists,
        "![validation loss over steps and over training time](loss.png)" * (stated["kind"] != "ablation"),
        aligned("table | group | MB sent, all ranks | of dense | MB kept by rank 0", traffic(result)),
        aligned("fact | value | from", facts),
        aligned("setting | parent | here", ([key, *map(json.dumps, pair)] for key, pair in result["changed"].items())),
        aligned("unfinished run | outcome | cause", ([x.get(key) for key in ("folder", "outcome", "cause")]
                                                     for x in result["unfinished"]))])) + "\n"

def traffic(result: dict[str, Any]) -> Iterator[list[Any]]:
    """Means over the runs of a group, by table and group."""
    for table in next(iter(result["runs"].values()))["comms"] if result["stated"]["kind"] != "ablation" else ():
        for name, members in result["stated"]["groups"].items():
            sent, dense, kept = (compare.mean(result["runs"][run]["comms"][table][key] for run in members)
                                 for key in ("bytes_sent", "bytes_dense", "memory_bytes"))
            yield [table, name, f"{sent / 1e6:.1f}", sent / dense if dense else None, f"{kept / 1e6:.1f}"]

def write(folder: Path, stated: dict[str, Any]) -> None:
    """Make all that follows from the logs; the text by hand stays."""
    sides, (hand, _, _) = grouped(folder, stated), text(folder / "README.md").partition(MARK)
    for problem in problems(sides, stated, folder):
        raise ToolError(*problem, "leave runs out, or make groups or records of them; rules: records/README.md")
    if stated["parent"]:
        (folder / DIFF).write_bytes(parent_diff(folder, stated).encode())
    if stated["kind"] not in ("ablation", "prediction"):                    # many curves would hide each other; none
        compare.plot({name or "all": group.runs for name, group in sides.items()}, folder / "loss.png")
    result = build(folder, stated, sides)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    hand = hand or f"# {stated['number']} {stated['name']}\n\nThe idea:\n\n"
    (folder / "README.md").write_bytes((hand + MARK + page(result)).encode())

def new(args: argparse.Namespace, root: Path) -> int:
    folder = staged = find(root, args.update) if args.update else root / ".unfinished"
    if args.update:
        stated = load(folder)["stated"]
    else:
        number = 1 + max((int(match[2]) for path in folders(root) if (match := FOLDER.fullmatch(path.name))), default=0)
        stated = {"date": args.date or f"{datetime.date.today()}", "number": f"{number:02}", "name": args.name or "",
                  "kind": "entry", "track": None, "parent": None, "groups": {}, "entry": {}, "bench": []}
        folder = root / "_".join([stated["date"], stated["number"], stated["name"]])
        if not FOLDER.fullmatch(folder.name) or not args.runs:
            raise ToolError("record", f"{folder.name}, runs {args.runs}", "YYYY-MM-DD_nn_NAME, RUNS", "new --help")
    stated |= {key: given for key in ("kind", "track") if (given := getattr(args, key))}
    stated |= {"parent": find(root, args.parent).name} if args.parent else {}
    stated["entry"] |= {key: json.loads(given) for key, _, given in (item.partition("=") for item in args.entry)}
    if not args.update:
        shutil.rmtree(staged, ignore_errors=True)                           # of an earlier call that failed
        gather(args, staged, stated)
    if args.bench:
        stated["bench"] = sorted({*stated["bench"], (name := args.bench.resolve().name)})
        for log in [MANIFEST, *(f"{line['folder']}/{log}" for line in lines(args.bench / MANIFEST, "end")
                                for log in line.get("logs", ()))]:
            (copy := staged / name / log).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(args.bench / log, copy)
    write(staged, stated)
    print(staged.rename(folder))
    return 0

def gather(args: argparse.Namespace, staged: Path, stated: dict[str, Any]) -> None:
    """Copy what the record is made of and the sources, and note the groups."""
    asked = [re.fullmatch(r"(?:(\w+)=)?(.*)", item).groups() for item in args.runs]
    sources = (prediction.gather if predicts(stated) else gather_runs)(asked, staged, stated)
    groups = stated["groups"]
    base = min(groups, key=lambda name: name != ablate.BASELINE) if len(groups) > 1 else None
    stated |= {"base": base, "main": min(groups, key=lambda name: (name == base) == (stated["kind"] == "entry"))}
    shutil.copyfile(sources[stated["main"]], staged / SOURCE)
    for name, source in sources.items():
        if diff := unified(staged / SOURCE, source):
            (staged / "sources").mkdir(exist_ok=True)
            (staged / f"sources/{name}.diff").write_bytes(diff.encode())

def gather_runs(asked: list[tuple[str | None, str]], staged: Path, stated: dict[str, Any]) -> dict[str, Path]:
    """Copy logs and manifest of the runs, and note the groups. Returns the trainer of each group."""
    groups, sources, kept = stated["groups"], {}, staged / "logs"
    for group, log in ((group, log) for group, paths in asked for path in paths.split(",")
                       for log in sorted(Path(path).rglob(LOGS[0])) or [Path(path, LOGS[0])]):
        run, (manifest, end) = read_log(log), in_manifest(log)
        if end.get("outcome", "done") != "done":
            continue                                                        # the manifest lists it
        label = group or end.get("arm") or end.get("side") or ""
        name = end.get("folder") or (log.parent.name if label in log.parent.name else f"{label}_{log.parent.name}")
        if (kept / name).exists():
            raise ToolError("two runs of one name", log.parent, f"another name than {name}", "rename its folder")
        (kept / name).mkdir(parents=True)
        for source, copy in [(log.parent / file, kept / name / file) for file in LOGS] + [(manifest, kept / MANIFEST)]:
            if source and source.exists():
                shutil.copyfile(source, copy)
        groups.setdefault(label, []).append(name)
        sources.setdefault(label, source_of(run))
    return sources

def check(args: argparse.Namespace, root: Path) -> int:
    chosen = [find(root, name) for name in args.chosen] or folders(root)
    found = [f"{folder.name}: {finding}" for folder in chosen for finding in findings(folder)]
    found += [f"{place.name}: {finding}" for place in (root, root.parent) if not args.chosen
              for finding in dead_links(place / "README.md")]
    known = sorted((match[2], match[1], path.name) for path in folders(root) if (match := FOLDER.fullmatch(path.name)))
    found += [f"{name}: expected a number of its own, and no date before that of {before}"
              for (number, date, before), (its_number, its_date, name) in zip(known, known[1:])
              if number == its_number or its_date < date]
    print("\n".join(found) or f"{len(chosen)} records: all numbers follow from their logs")
    return int(bool(found))

def findings(folder: Path) -> Iterator[str]:
    """All in a record that does not follow from its logs."""
    yield from dead_links(folder / "README.md")
    try:
        stated = (result := load(folder))["stated"]
        datetime.date.fromisoformat(stated["date"])
        if folder.name != "_".join(stated[key] for key in ("date", "number", "name")):
            yield "found this folder name, expected YYYY-MM-DD_nn_NAME with date, number and name of result.json"
        for name, (noted, there) in changes(result["files"], hashes(folder)).items():
            yield f"{name}: {'added' if not noted else 'edited: another sha256' if there else 'missing'}"
        sides = grouped(folder, stated)
        yield from (f"{what}: found {this}, expected {it}" for what, this, it in problems(sides, stated, folder))
        follows = build(folder, stated, sides) | {"files": result["files"]}              # compared above
        yield from (f"source of group {name!r}: {SOURCE} does not hash to the source_sha256 of its logs"
                    for name, pool in follows["groups"].items()
                    if source_sha256(folder, name) != pool["source_sha256"]
                    and (pool["source_sha256"] or not predicts(stated)))    # a ledger may not tell its source
        for name, one, other in (("result.json", *(json.dumps(x, indent=1) for x in (result, follows))),
                                 ("README.md", text(folder / "README.md").partition(MARK)[2], page(result)),
                                 (DIFF, text(folder / DIFF), parent_diff(folder, stated))):
            yield from (f"{name}: found {a!r}, but {b!r} follows" for a, b in zip_longest(
                one.splitlines(), other.splitlines(), fillvalue="nothing") if a != b)
    except ToolError as error:
        yield str(error)
    except (OSError, LookupError, TypeError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        yield f"not as `new` makes it: {type(error).__name__} {error}"

def dead_links(readme: Path) -> Iterator[str]:
    """Relative links of a Markdown page that lead nowhere; code is left out."""
    for link in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text(readme), flags=re.S)):
        if not re.match(r"\w+:|#", link) and not (readme.parent / link.partition("#")[0]).exists():
            yield f"{readme.name}: dead link {link}"

def table(args: argparse.Namespace, root: Path) -> int:
    entries = [result for result in map(load, folders(root)) if result["stated"]["kind"] == "entry"]
    boards = {name: ranked(track, [result for result in entries if result["stated"]["track"] == name])
              for name, track in TRACKS.items()}
    print(json.dumps(boards, indent=1) if args.json else "Entries by track; `check` tells whether they hold.")
    for name, track in TRACKS.items() if not args.json else ():
        print(f"\n{name}: by {track.rank}, of runs with {track.needs or 'one budget_s'}; rules: records/README.md")
        for key, rows in boards[name].items():
            print(f"\n{key}\n{aligned(' | '.join(rows[0]), map(dict.values, rows))}")
    return 0

def ranked(track: Track, results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Lists of entries of one class that share what their numbers depend on, best first.
    With a target p is that of the losses against it, and who has not proven it (of a systems change: the verdict
    `faster` against its baseline) has no rank. Without one p is that of a loss lower than the next entry's."""
    boards: dict[str, list[dict[str, Any]]] = {}
    pool = lambda result: result["groups"][result["stated"]["main"]]
    for result in sorted(results, key=lambda result: pool(result)[track.rank]["mean"]):
        same = {"class": result["class"], **{key: result["machine"][key] for key in track.alike}}
        boards.setdefault(", ".join(f"{key} {fact}" for key, fact in same.items()), []).append(result)
    for name, entries in boards.items():
        rank, boards[name] = 0, []
        for result, after in zip_longest(entries, entries[1:]):
            stated, own, words = result["stated"], pool(result), [x["verdict"] for x in result["verdicts"].values()]
            p = verdict.welch(pool(after)["losses"], own["losses"]).p / 2 if after and not track.target else own["p"]
            faster = stated["entry"].get("systems") and "faster" in words
            rank += (proven := bool(not track.target or faster or (p is not None and p < verdict.ALPHA)))
            boards[name].append({
                "rank": rank if proven else None, "record": f"{stated['number']} {stated['name']}", "p": p,
                "seeds": len(own["losses"]), "loss": own["loss"]["mean"], "sd": own["loss"]["sd"],
                "seconds": own["seconds"]["mean"], "sd of s": own["seconds"]["sd"],
                "against baseline": ", ".join(words) or None,
                **{key: fact for key, fact in result["entry"].items() if key != "table_rows"}})      # a list of its own
    return boards

def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("records", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    makes, checks, prints = (verbs.add_parser(verb.__name__) for verb in (new, check, table))
    for sub, verb in ((makes, new), (checks, check), (prints, table)):
        sub.set_defaults(verb=verb)
        sub.add_argument("--records", type=Path, default=RECORDS, help="folder of all records")
    makes.add_argument("name", nargs="?", help="letters, digits, underscores")
    makes.add_argument("runs", nargs="*", help="run directories, or folders of them; GROUP=PATH,... names a group. "
                       "For a prediction: ledgers and a table of rates")
    makes.add_argument("--kind", choices=("entry", "comparison", "ablation", "prediction"), help="[entry]")
    makes.add_argument("--track", choices=TRACKS)
    makes.add_argument("--entry", metavar="KEY=JSON", action="append", default=[], help=f"systems=true, or of {ENTRY}")
    makes.add_argument("--bench", type=Path, help="folder that `bench` left, to be kept in the record")
    for flag, about in {"update": "make its pages again", "parent": "a record", "date": "YYYY-MM-DD [today]"}.items():
        makes.add_argument(f"--{flag}", help=about)
    checks.add_argument("chosen", nargs="*", metavar="RECORD")
    prints.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    return args.verb(args, args.records.resolve())

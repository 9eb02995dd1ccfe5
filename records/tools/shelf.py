"""Verbs `new`, `check`, `table`: a record is a folder of logs and pages made from them; check makes every number again.

    python records new NAME RUNS... [--track=pocket] [--kind=comparison] [--parent=01] [--date=...]
    python records new --update RECORD [--bench=DIR]
    python records check [RECORD...]        python records table [--json]
`build` computes result.json from a record's logs and from what was stated when it was made (result["stated"]); `page`
makes the README from result.json. `new` writes both, `check` compares both. A prediction is made from ledgers and a
table of rates instead of runs (prediction.py). What the accounts of a run must agree in is in evidence.py, what git
remembers in history.py.

Exit status: 0 done; 1 check has found something; 2 bad input, or runs that are no record."""
from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tools import ablate, compare, evidence, history, logs, prediction, verdict
from tools.ablate import aligned
from tools.compare import Side
from tools.layout import (DIFF, FOLDER, LOG, LOGS, MANIFEST, MANIFEST_DEPTH, MARK, PAGE, PLOT, RECORDS, RESULT, SOURCE,
                          changes, find, folders, hashes, lines, links_out, load, parent_diff, predicts, sha256,
                          short_hashes, shown, text, unified)
from tools.logs import Run, ToolError
from tools.page import page
from tools.rules import ALIKE, ENTRY, TRACKS, Problem, Track, class_of, problems, value

DIGITS = 9                         # of numbers in result.json: another version of a library may change the last ones
MACHINE = *ALIKE, "python", "nccl", "triton", "attention", "head", "preset", "git_commit", "budget_s", "val_tokens"
OF_REPORT = "verdict", "reason", "loss", "time", "memory", "method", "runs_to_settle"    # what a record keeps of one
KINDS = "entry", "comparison", "ablation", "prediction"
SHOWN_LINES = 12                   # of a file that does not follow
UNFINISHED = ".unfinished"         # folder in which `new` works
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)"            # [text](link "title")
                  r"|^ *\[[^\]]+\]:\s*<?([^\s>]+)"  # [text]: link
                  r"|\b(?:src|href)\s*=\s*[\"']?([^\s\"'>]+)", re.M | re.I)
KEPT = "files", "picture_sha256", "changes"        # parts of result.json that do not follow from logs
ELSEWHERE = re.compile(r"\w+:|#")  # begins a link to the web, or to a place on the same page


# ---- Reading a record's logs
def read_log(path: Path) -> Run:
    try:
        return logs.read_file(path)[0]
    except (OSError, logs.NotALog) as error:
        raise ToolError(f"log {path}", error, "the log of one run", "restore it, or leave it out") from None


def grouped(folder: Path, stated: dict[str, Any]) -> dict[str, Side]:
    """The logs of a record, by group; a prediction has none."""
    sides: dict[str, Side] = {}
    if predicts(stated):
        return sides
    for name, members in stated["groups"].items():
        runs = [read_log(folder / "logs" / member / LOG) for member in members]
        sides[name] = Side(name, [], logs.Reading(runs, [], []))
    return sides


def in_manifest(log: Path) -> tuple[Path | None, dict[str, Any]]:
    """The manifest above a log, and the line of its run's end."""
    above = log.resolve().parents
    for folder in above[:MANIFEST_DEPTH]:
        for line in lines(folder / MANIFEST, "end"):
            if folder / line["folder"] in above:
                return folder / MANIFEST, line
    return None, {}


def source_of(run: Run) -> Path:
    """The trainer that made a log, beside it or in a folder above."""
    for folder in run.path.resolve().parents[:MANIFEST_DEPTH]:
        for path in sorted(folder.glob("*.py")):
            if sha256(path) == run.facts["source_sha256"]:
                return path
    raise ToolError(f"source of {run.path}", "none with its source_sha256", "a trainer", "put it beside the log")


def source_sha256(folder: Path, group: str) -> str:
    """Of the source of a group: that of the record, changed by its diff where it has one."""
    with tempfile.TemporaryDirectory() as work:
        copy = Path(shutil.copy(folder / SOURCE, work))
        diff = folder / f"sources/{group}.diff"
        if diff.exists():
            subprocess.run(["git", "apply", "--whitespace=nowarn", diff], cwd=work, check=True)
        return sha256(copy)


def doubts(folder: Path, stated: dict[str, Any], sides: dict[str, Side]) -> Iterator[Problem]:
    """Why this is no record: rules that its runs break, and accounts of one run that contradict each other."""
    for link in links_out(folder):
        yield link, "a link out of the record", "a file of its own"
    yield from problems(sides, stated, folder)

    runs = [run for side in sides.values() for run in side.reading.runs]
    yield from evidence.misdated(stated["date"], folder, runs)
    for run in runs:
        if run.val and run.result:                              # else it was named above
            yield from evidence.contradictions(run)
    yield from evidence.copies(runs)
    for name in ("logs", *stated["bench"]):
        yield from evidence.unlike_manifest(folder / name)


# ---- The numbers of a record: result.json
def build(folder: Path, stated: dict[str, Any], sides: dict[str, Side]) -> dict[str, Any]:
    """result.json of a record."""
    if predicts(stated):
        follows = prediction.build(folder, stated)
        return rounded({"stated": stated, **follows, "files": hashes(folder)})

    first = sides[stated["main"]].runs[0]
    entry = {key: stated["entry"].get(key, value(first, key)) for key in ENTRY}
    track = TRACKS.get(stated["track"])
    target = track.target if track else None
    config = compare.config(first)
    unfinished = [line for line in lines(folder / "logs" / MANIFEST, "end") if line["outcome"] != "done"]
    result = {
        "stated": stated,
        "target": target,
        "machine": {key: value(first, key) for key in MACHINE},
        "entry": entry,
        "class": class_of(entry["table_rows"], value(first, "vocab_size")),
        "groups": {name: pool(side, target) for name, side in sides.items()},
        "runs": runs_of(folder, sides),
        "verdicts": verdicts(sides, stated),
        "arms": ablated(sides) if stated["kind"] == "ablation" else {},
        "bench": {name: benched(folder / name) for name in stated["bench"]},
        "config": config,
        "changed": changes(parents_config(folder, stated, config), config),
        "files": hashes(folder),
        "unfinished": unfinished,
    }
    return rounded(compare.jsonable(result))


def rounded(result: dict[str, Any]) -> dict[str, Any]:
    def short(number: str) -> float:
        return float(f"{float(number):.{DIGITS}g}")
    return json.loads(json.dumps(result), parse_float=short)


def parents_config(folder: Path, stated: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What settings are compared with; those of the record itself where it has no parent that has any."""
    if not stated["parent"]:
        return own
    return load(folder.parent / stated["parent"]).get("config", own)


def runs_of(folder: Path, sides: dict[str, Side]) -> dict[str, dict[str, Any]]:
    """The numbers of each run, by its folder."""
    found = {}
    for side in sides.values():
        for run in side.reading.runs:
            name = run.path.parent.relative_to(folder / "logs").as_posix()
            found[name] = numbers(run)
    return found


def numbers(run: Run) -> dict[str, Any]:
    entropy = value(run, "unigram_nats")
    memory = value(run, "peak_memory_mib")
    untimed = [phase for phase in run.phases if not phase["timed"]]
    return {
        "seed": run.seed,
        "loss": run.loss,
        "seconds": run.seconds,
        "steps": value(run, "steps"),
        "tokens": value(run, "tokens"),
        "memory_mib": max(memory.values()) if memory else None,
        "bits_per_byte": value(run, "val_bpb"),
        "of_unigram_entropy": run.loss / entropy if entropy else None,
        "comms": value(run, "comms") or {},
        "untimed_s": {phase["name"]: phase["ms"] / 1000 for phase in untimed},
    }


def pool(group: Side, target: float | None) -> dict[str, Any]:
    """A group: losses by seed (those of a repeated seed are averaged, so n counts seeds), times of all runs."""
    losses = group.losses()
    return {
        "losses": losses,
        "times": group.times,
        "loss": verdict.summary(losses),
        "seconds": verdict.summary(group.times),
        "p": target and verdict.one_sample(losses, target),
        "source_sha256": value(group.runs[0], "source_sha256"),
    }


def reported(a: Side, b: Side) -> dict[str, Any]:
    report = compare.compare(a, b)
    return {key: report[key] for key in OF_REPORT}


def verdicts(sides: dict[str, Side], stated: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each group against the base; arms of an ablation have measures instead."""
    base = sides.get(stated["base"])
    found: dict[str, dict[str, Any]] = {}
    if base is None or stated["kind"] == "ablation":
        return found
    for name, side in sides.items():
        if side is not base:
            found[name] = reported(base, side)
    return found


def benched(folder: Path) -> dict[str, Any]:
    """The verdict on a bench kept in a record, from the logs of its complete pairs."""
    pairs = {line["pair"] for line in lines(folder / MANIFEST, "pair")}
    kept: dict[str, list[Path]] = {"A": [], "B": []}
    for line in lines(folder / MANIFEST, "end"):
        if line["outcome"] == "done" and line["pair"] in pairs:
            kept[line["side"]] += [folder / line["folder"] / log for log in line["logs"]]
    a, b = (compare.side_of(side, paths) for side, paths in kept.items())
    return {"pairs": len(pairs), **reported(a, b)}


def ablated(sides: dict[str, Side]) -> dict[str, dict[str, Any]]:
    """By arm: what its header changes, and its measures."""
    runs = []
    for name, side in sides.items():
        runs += [(name, run.seed, run) for run in side.runs]
    whole = compare.config(sides[ablate.BASELINE].runs[0])

    found = {}
    for name, measures in ablate.measured(runs).items():
        without = compare.config(sides[name].runs[0])
        found[name] = {"changed": changes(whole, without), **measures}
    return found


# ---- Verb new
def new(args: argparse.Namespace, root: Path) -> int:
    folder = updated(args, root) if args.update else made(args, root)
    print(shown(folder))
    return 0


def made(args: argparse.Namespace, root: Path) -> Path:
    """A record from runs; it gets its name when all of it is there."""
    stated = first_statement(args, root)
    folder = root / folder_of(stated)
    if not FOLDER.fullmatch(folder.name) or not args.runs:
        found = f"{folder.name}, runs {args.runs}"
        raise ToolError("record", found, "YYYY-MM-DD_nn_NAME, RUNS", "new --help")

    staged = root / UNFINISHED
    shutil.rmtree(staged, ignore_errors=True)                               # of an earlier call that failed
    state(args, root, stated)
    gather(args.runs, staged, stated)
    if args.bench:
        gather_bench(args.bench, staged, stated)
    write(staged, stated)
    return staged.rename(folder)


def updated(args: argparse.Namespace, root: Path) -> Path:
    """The pages of a record, made again from the logs that it has."""
    folder = find(root, args.update)
    for problem in history.lost(root, [folder]):
        raise ToolError(*problem, f"git log -- {shown(folder)} tells when; restore it")
    stated = load(folder)["stated"]
    state(args, root, stated)
    if args.bench:
        gather_bench(args.bench, folder, stated)
    write(folder, stated)
    return folder


def state(args: argparse.Namespace, root: Path, stated: dict[str, Any]) -> None:
    """Add what the settings say of a record."""
    for key in ("kind", "track"):
        stated[key] = getattr(args, key) or stated[key]
    if args.parent:
        stated["parent"] = find(root, args.parent).name
    for item in args.entry:
        key, _, given = item.partition("=")
        stated["entry"][key] = json.loads(given)


def folder_of(stated: dict[str, Any]) -> str:
    return "_".join(stated[key] for key in ("date", "number", "name"))


def first_statement(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """What is stated of a record that is not there yet; its number is the next one."""
    numbers_there = [0]
    for path in folders(root):
        match = FOLDER.fullmatch(path.name)
        if match:
            numbers_there.append(int(match[2]))
    return {"date": args.date or f"{datetime.date.today()}", "number": f"{1 + max(numbers_there):02}",
            "name": args.name or "", "kind": "entry", "track": None, "parent": None, "groups": {}, "entry": {},
            "bench": []}


def gather(items: list[str], staged: Path, stated: dict[str, Any]) -> None:
    """Copy what the record is made of and the sources, and note the groups. items: PATH,... or GROUP=PATH,..."""
    asked = [re.fullmatch(r"(?:(\w+)=)?(.*)", item).groups() for item in items]
    gathering = prediction.gather if predicts(stated) else gather_runs
    sources = gathering(asked, staged, stated)

    groups = list(stated["groups"])
    base = None
    if len(groups) > 1:
        base = ablate.BASELINE if ablate.BASELINE in groups else groups[0]
    main = groups[0]
    if base is not None:
        others = [name for name in groups if name != base]
        main = others[0] if stated["kind"] == "entry" else base
    stated |= {"base": base, "main": main}

    shutil.copyfile(sources[main], staged / SOURCE)
    for name, source in sources.items():
        diff = unified(staged / SOURCE, source)
        if diff:
            (staged / "sources").mkdir(exist_ok=True)
            (staged / f"sources/{name}.diff").write_bytes(diff.encode())


def gather_runs(asked: list[tuple[str | None, str]], staged: Path, stated: dict[str, Any]) -> dict[str, Path]:
    """Copy logs and manifest of the runs, and note the groups. Returns the trainer of each group."""
    sources: dict[str, Path] = {}
    for group, paths in asked:
        for log in logs_below(paths.split(",")):
            run = read_log(log)
            manifest, end = in_manifest(log)
            if end.get("outcome", "done") != "done":
                continue                                                    # the manifest lists it
            label = group or end.get("arm") or end.get("side") or ""
            own_name = log.parent.name if label in log.parent.name else f"{label}_{log.parent.name}"
            name = end.get("folder", own_name)
            if end.get("runs", 1) > 1:
                name += f"/{log.parent.name}"                               # one of several of a process
            keep(log.parent, staged / "logs" / name)
            if manifest:
                shutil.copyfile(manifest, staged / "logs" / MANIFEST)
            stated["groups"].setdefault(label, []).append(name)
            sources.setdefault(label, source_of(run))
    return sources


def logs_below(paths: list[str]) -> Iterator[Path]:
    """Logs of run directories, or of folders of them; a path without any is named as it would have to be."""
    for path in paths:
        yield from sorted(Path(path).rglob(LOG)) or [Path(path, LOG)]


def keep(run_folder: Path, copy: Path) -> None:
    """Copy the logs of a run."""
    if copy.exists():
        raise ToolError("two runs of one name", run_folder, f"another name than {copy.name}", "rename its folder")
    copy.mkdir(parents=True)
    for name in LOGS:
        if (run_folder / name).exists():
            shutil.copyfile(run_folder / name, copy / name)


def gather_bench(bench: Path, staged: Path, stated: dict[str, Any]) -> None:
    """Copy the manifest and the logs of a bench. Raises ToolError if the record has others of that name; a bench that
    went on has the manifest that the record has, and more."""
    name = bench.resolve().name
    stated["bench"] = sorted({*stated["bench"], name})
    kept = [MANIFEST]
    for line in lines(bench / MANIFEST, "end"):
        kept += [f"{line['folder']}/{log}" for log in line.get("logs", ())]
    for log in kept:
        copy = staged / name / log
        if copy.exists() and not (bench / log).read_bytes().startswith(copy.read_bytes()):
            raise ToolError(f"bench {name}", f"another {log} in the record", "the same, or a bench of another name",
                            "rename its folder")
    for log in kept:
        copy = staged / name / log
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bench / log, copy)


def write(folder: Path, stated: dict[str, Any]) -> None:
    """Make all that follows from the logs; the text by hand stays."""
    sides = grouped(folder, stated)
    for problem in doubts(folder, stated, sides):
        raise ToolError(*problem, "leave runs out, or make groups or records of them; rules: records/README.md")

    if stated["parent"]:
        (folder / DIFF).write_bytes(parent_diff(folder, stated).encode())
    if stated["kind"] not in ("ablation", "prediction"):                    # many curves would hide each other; none
        curves = {name or "all": side.runs for name, side in sides.items()}
        compare.plot(curves, folder / PLOT)
    result = build(folder, stated, sides)
    if (folder / PLOT).exists():
        result["picture_sha256"] = sha256(folder / PLOT)
    result = history.updated(folder, result)
    (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    by_hand, _, _ = text(folder / PAGE).partition(MARK)
    if not by_hand:
        by_hand = f"# {stated['number']} {stated['name']}\n\nThe idea:\n\n"
    (folder / PAGE).write_bytes((by_hand + MARK + page(result)).encode())


# ---- Verb check
def check(args: argparse.Namespace, root: Path) -> int:
    chosen = [find(root, name) for name in args.chosen] or folders(root)
    if not chosen:
        raise ToolError(f"records in {shown(root)}", "none", "at least one", "name their folder: --records")
    found = []
    for folder in chosen:
        found += [f"{folder.name}: {finding}" for finding in findings(folder)]
    if not args.chosen:
        for place in (root, root.parent):
            found += [f"{place.name}: {finding}" for finding in dead_links(place / PAGE)]
    found += misnumbered(root)
    for what, this, expected in history.lost(root, chosen if args.chosen else None):
        found.append(f"{what}: found {this}, expected {expected}")
    if found:
        print("\n".join(found))
        return 1
    print(f"{len(chosen)} records: all numbers follow from their logs; {history.remark(root)}")
    return 0


def misnumbered(root: Path) -> Iterator[str]:
    """Records that share a number, or whose dates do not follow their numbers."""
    matches = filter(None, (FOLDER.fullmatch(path.name) for path in folders(root)))
    known = sorted((match[2], match[1], match[0]) for match in matches)
    for (number, date, name), (next_number, next_date, next_name) in zip(known, known[1:]):
        if number == next_number or next_date < date:
            yield f"{next_name}: expected a number of its own, and no date before that of {name}"


def findings(folder: Path) -> Iterator[str]:
    """All in a record that does not follow from its logs."""
    yield from dead_links(folder / PAGE)
    try:
        result = load(folder)
        yield from unlike_its_files(folder, result)
        yield from unlike_its_logs(folder, result)
        for what, found, expected in history.unsaid(folder, result):
            yield f"{what}: found {found}, expected {expected}"
    except ToolError as error:
        yield str(error)
    except (OSError, LookupError, TypeError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        yield f"not as `new` makes it: {type(error).__name__} {error}"


def unlike_its_files(folder: Path, result: dict[str, Any]) -> Iterator[str]:
    """The name of the folder, and the files that result.json lists."""
    stated = result["stated"]
    datetime.date.fromisoformat(stated["date"])
    if folder.name != folder_of(stated):
        yield "found this folder name, expected YYYY-MM-DD_nn_NAME with date, number and name of result.json"
    for name, (noted, there) in changes(result["files"], hashes(folder)).items():
        if not noted:
            yield f"{name}: added"
        elif not there:
            yield f"{name}: missing"
        else:
            yield f"{name}: edited: another sha256"
    yield from unlike_picture(folder, result)


def unlike_picture(folder: Path, result: dict[str, Any]) -> Iterator[str]:
    """A picture that is none, or another than `new` drew."""
    if not (folder / PLOT).is_file():
        return                                                      # the page has a dead link
    if not evidence.is_png((folder / PLOT).read_bytes()):
        yield f"{PLOT}: no PNG"
    noted = result.get("picture_sha256")
    if noted is None and result["stated"]["date"] > history.SAYS_SINCE:
        yield f"{PLOT}: {RESULT} has no picture_sha256; new --update makes both again"
    if noted is not None and noted != sha256(folder / PLOT):
        yield f"{PLOT}: edited: another sha256"


def unlike_its_logs(folder: Path, result: dict[str, Any]) -> Iterator[str]:
    """Whatever `new` would make otherwise, line by line."""
    stated = result["stated"]
    sides = grouped(folder, stated)
    for what, found, expected in doubts(folder, stated, sides):
        yield f"{what}: found {found}, expected {expected}"

    follows = build(folder, stated, sides)
    for key in KEPT:
        if key in result:
            follows[key] = result[key]                              # compared elsewhere
    for name, group in follows["groups"].items():
        noted = group["source_sha256"]
        if predicts(stated) and not noted:
            continue                                                # a ledger may not tell its source
        if source_sha256(folder, name) != noted:
            yield f"source of group {name!r}: {SOURCE} does not hash to the source_sha256 of its logs"

    _, _, its_page = text(folder / PAGE).partition(MARK)
    yield from differing(RESULT, json.dumps(result, indent=1), json.dumps(follows, indent=1))
    yield from differing(PAGE, its_page, page(result))
    yield from differing(DIFF, text(folder / DIFF), parent_diff(folder, stated))


def differing(name: str, found: str, expected: str) -> Iterator[str]:
    both = zip_longest(found.splitlines(), expected.splitlines(), fillvalue="nothing")
    unlike = [(one, other) for one, other in both if one != other]
    for one, other in unlike[:SHOWN_LINES]:
        yield f"{name}: found {one!r}, but {other!r} follows"
    if len(unlike) > SHOWN_LINES:
        yield f"{name}: and {len(unlike) - SHOWN_LINES} more such lines"


def dead_links(readme: Path) -> Iterator[str]:
    """Relative links of a Markdown page that lead nowhere; code is left out."""
    for match in LINK.finditer(CODE.sub("", text(readme))):
        link = next(filter(None, match.groups()))
        path = link.partition("#")[0]
        if not ELSEWHERE.match(link) and not (readme.parent / path).exists():
            yield f"{readme.name}: dead link {link}"


# ---- Verb table
def table(args: argparse.Namespace, root: Path) -> int:
    results = [load(folder) for folder in folders(root)]
    entries = [result for result in results if result["stated"]["kind"] == "entry"]
    boards = {}
    for name, track in TRACKS.items():
        boards[name] = ranked(track, [result for result in entries if result["stated"]["track"] == name])
    if args.json:
        print(json.dumps(boards, indent=1))
        return 0

    print("Entries by track; `check` tells whether they hold.")
    for name, track in TRACKS.items():
        needed = track.needs if track.needs else "one budget_s"
        print(f"\n{name}: by {track.rank}, of runs with {needed}; rules: records/README.md")
        for found in boards[name]:
            title = ", ".join(f"{key} {fact}" for key, fact in found["alike"].items())
            cells = [row.values() for row in found["entries"]]
            print(f"\n{short_hashes(title)}\n{aligned(' | '.join(found['entries'][0]), cells)}")
    return 0


def main_pool(result: dict[str, Any]) -> dict[str, Any]:
    """The group that an entry stands for."""
    return result["groups"][result["stated"]["main"]]


def ranked(track: Track, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists of entries of one class that share what their numbers depend on ("alike"), best first."""
    def place(result: dict[str, Any]) -> float:
        return main_pool(result)[track.rank]["mean"]

    members: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(results, key=place):
        alike = {"class": result["class"]}
        for key in track.alike:
            alike[key] = result["machine"][key]
        members.setdefault(json.dumps(alike), []).append(result)
    return [{"alike": json.loads(alike), "entries": board(track, its)} for alike, its in members.items()]


def board(track: Track, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one list. With a target p is that of the losses against it, and who has not proven it (of a systems
    change: the verdict `faster` against its baseline) has no rank. Without one p is that of a loss lower than the next
    entry's."""
    rows = []
    rank = 0
    for result, after in zip_longest(entries, entries[1:]):
        stated = result["stated"]
        own = main_pool(result)
        words = [report["verdict"] for report in result["verdicts"].values()]

        p = own["p"]
        if after and not track.target:
            p = verdict.welch(main_pool(after)["losses"], own["losses"]).p / 2
        proven = not track.target
        if p is not None and p < verdict.ALPHA:
            proven = True
        if stated["entry"].get("systems") and "faster" in words:
            proven = True
        rank += proven

        entry = {key: fact for key, fact in result["entry"].items() if key != "table_rows"}    # a list of its own
        rows.append({
            "rank": rank if proven else None,
            "record": f"{stated['number']} {stated['name']}",
            "p": p,
            "seeds": len(own["losses"]),
            "loss": own["loss"]["mean"],
            "loss_sd": own["loss"]["sd"],
            "seconds": own["seconds"]["mean"],
            "seconds_sd": own["seconds"]["sd"],
            "against_baseline": ", ".join(words) or None,
            **entry})
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("records", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for verb, settings_of in ((new, settings_of_new), (check, settings_of_check), (table, settings_of_table)):
        sub = verbs.add_parser(verb.__name__)
        sub.set_defaults(verb=verb)
        sub.add_argument("--records", type=Path, default=RECORDS, help="folder of all records")
        settings_of(sub)
    args = parser.parse_args(argv)
    return args.verb(args, args.records.resolve())


def settings_of_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="letters, digits, underscores")
    parser.add_argument("runs", nargs="*", help="run directories, or folders of them; GROUP=PATH,... names a group. "
                        "For a prediction: ledgers and a table of rates")
    parser.add_argument("--kind", choices=KINDS, help="[entry]")
    parser.add_argument("--track", choices=TRACKS)
    parser.add_argument("--entry", metavar="KEY=JSON", action="append", default=[],
                        help=f"systems=true, or of {ENTRY}")
    parser.add_argument("--bench", type=Path, help="folder that `bench` left, to be kept in the record")
    parser.add_argument("--update", help="make its pages again")
    parser.add_argument("--parent", help="a record")
    parser.add_argument("--date", help="YYYY-MM-DD [today]")


def settings_of_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chosen", nargs="*", metavar="RECORD")


def settings_of_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")

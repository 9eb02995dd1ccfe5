"""Records of kind prediction: made from ledgers and rates, and each kind of damage found. No torch, made-up ledgers."""
import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "records"))

from tools import prediction, shelf  # noqa: E402  (records/ has to be on the path first)
from tools.logs import ToolError  # noqa: E402

MOVED = 3_050_000_000                                                         # bytes: 1 ms of an H100's memory
SLACK_MS = 1.197                                                              # what the price makes of it


def write_ledger(folder: Path, launches: int = 2, name: str = "ledger.json", **more) -> Path:
    """A checkout with a trainer and a ledger: `launches` kernels in each step, and a collective in odd ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_gpt.py").write_text("".join(f"line_{n} = {n}\n" for n in range(20)))
    moving = ["segment", "moving"]
    sending = ["collective", 1, "all_gather_into_tensor", 4_000_000, "bfloat16", "nccl"]
    even = phase([moving], launches)
    odd = phase([moving, ["repeat", 2, [moving]], sending, ["wait", 1], ["host_wait", "loss.item()"]], 3 * launches)
    odd |= dict(collectives=1, collective_bytes=4_000_000, host_waits=1)
    world = dict(phases={"stage 1 even step": even, "stage 1 odd step": odd},
                 segments=dict(moving=[["run", "k1", launches]]))
    kernels = dict(k1=dict(kind="generated", name="triton_poi_fused_add", bytes=MOVED))
    ledger = dict(format=2, card="H100", torch="2.13.0", triton="3.7.1", flags=["--seed=1"], kernels=kernels,
                  steps={"stage 1": dict(even=100, odd=100)}, worlds={"8": world}) | more
    (folder / name).write_text(json.dumps(ledger))
    return folder / name


def phase(timeline: list, launches: int) -> dict:
    return dict(timeline=timeline, launches=launches, bytes=launches * MOVED, collectives=0, collective_bytes=0,
                host_waits=0, peak_bytes=5 << 20)


def call(*argv) -> tuple[int, str]:
    """Status and stdout of a verb."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = shelf.main(list(map(str, argv)))
    return status, out.getvalue()


def new(root: Path, *argv) -> Path:
    status, out = call("new", "--records", root, *argv, "--kind=prediction")
    return Path(out.strip())


def check(root: Path) -> str:
    """What check finds, "" for nothing."""
    status, out = call("check", "--records", root)
    return out if status else ""


def read(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


RATES = ROOT / "tests/rehearsal/rates.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A records folder with one prediction of one ledger, and its child of two."""
    place = tmp_path_factory.mktemp("predictions")
    root = place / "records"
    root.mkdir()
    today = write_ledger(place / "today")
    new(root, "Rehearsal", today, RATES, "--date=2026-01-01")
    idea = write_ledger(place / "idea", launches=3)
    (place / "idea/train_gpt.py").write_text("".join(f"line_{n} = {n + n // 9}\n" for n in range(20)))
    new(root, "Idea", f"today={today}", f"idea={idea}", RATES, "--parent=01", "--date=2026-01-02")
    assert check(root) == ""
    return root


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "records"))


def first(root: Path) -> Path:
    return root / "2026-01-01_01_Rehearsal"


def second(root: Path) -> Path:
    return root / "2026-01-02_02_Idea"


# ------------------------------------------------------------------------------------------------ what it holds

def test_sums_and_prices_follow_from_ledger_and_rates(made):
    """By hand: 2 launches of 1 ms in an even step, 6 in an odd one that also waits for 3.5 MB at 370 GB/s."""
    result = read(first(made))
    even, odd = result["sums"]["ledger"]["8"].values()
    assert (even["launches"], odd["launches"]) == (2, 6)
    assert (odd["bytes"], odd["collectives"], odd["collective_bytes"]) == (6 * MOVED, 1, 4_000_000)
    assert odd["host_waits"] == 1

    stage = result["prediction"]["ledger"]["worlds"]["8"]["FA2"]["stages"]["stage 1"]
    waited = 0.02 + 1000 * 3.5e6 / 370e9
    assert stage["even"]["ms"] == pytest.approx(2 * SLACK_MS, rel=1e-3)
    assert stage["odd"]["ms"] == pytest.approx(6 * SLACK_MS + waited, rel=1e-3)


def test_the_command_needs_nothing_that_a_test_has_loaded(tmp_path):
    """In a process of its own: tests have imported the arithmetic before, a user has not."""
    (tmp_path / "records").mkdir()
    ledger = write_ledger(tmp_path / "today")
    command = [sys.executable, ROOT / "records", "new", "Rehearsal", ledger, RATES, "--kind=prediction"]
    done = subprocess.run([*command, "--records", tmp_path / "records"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert check(tmp_path / "records") == ""


def test_it_claims_no_place(made):
    status, out = call("table", "--records", made)
    assert status == 0 and "Rehearsal" not in out
    page = (first(made) / "README.md").read_text()
    assert "It claims no place" in page and "no GPU has run anything" in page


def test_each_rate_of_the_card_stands_on_the_page_with_its_source(made):
    page = (first(made) / "README.md").read_text()
    rates = json.loads(RATES.read_text())
    facts = [*rates["cards"]["H100"]["rates"].values(), *rates["fixed"].values()]
    assert all(fact["source"] in page for fact in facts)
    assert "| H100 | FA3 " in page and "B200" not in page


def test_another_ledger_is_set_against_the_first(made):
    """A third launch: 1.2 ms more in an even step, 3.6 in an odd one, 2.39 in the mean, 0.48 s in 200."""
    page = (second(made) / "README.md").read_text()
    assert "Against today" in page and "stage 1: +2.39" in page and "| +0.48" in page
    assert "+line_9 = 10" in (second(made) / "sources/idea.diff").read_text()
    assert (second(made) / "source.diff").read_text() == ""


def test_pages_are_made_again_and_what_is_written_by_hand_stays(copy):
    page = first(copy) / "README.md"
    page.write_text(page.read_text().replace("The idea:", "Our own words."))
    before = page.read_text()
    new(copy, "--update=01")
    assert page.read_text() == before and check(copy) == ""


# ------------------------------------------------------------------------------------------------ damage is found

def change_ledger(folder: Path, old: str, text: str) -> None:
    path = folder / "ledgers/ledger.json"
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, text, 1))


def damage(folder: Path, kind: str) -> None:
    page = folder / "README.md"
    result = folder / "result.json"
    if kind == "ledger":
        change_ledger(folder, '"launches": 2', '"launches": 3')
    if kind == "line of a ledger":
        change_ledger(folder, '["run", "k1", 2]', '["run", "k1", 1]')
    if kind == "rate":
        path = folder / "rates.json"
        text = path.read_text()
        path.write_text(text.replace('"peak": 3350000000000.0, "share": 0.9104', '"peak": 4e12, "share": 0.9'))
    if kind == "page":
        page.write_text(page.read_text().replace("FA2, mean step", "FA2, mean step of ours"))
    if kind == "result":
        numbers = read(folder)
        numbers["prediction"]["ledger"]["worlds"]["8"]["FA2"]["run_s"] *= 0.5
        result.write_text(json.dumps(numbers, indent=1) + "\n")
    if kind == "more ledgers":
        shutil.copyfile(folder / "ledgers/ledger.json", folder / "ledgers/other.json")
    if kind == "place":
        numbers = read(folder)
        numbers["stated"]["track"] = "8xGPU"
        result.write_text(json.dumps(numbers, indent=1) + "\n")


@pytest.mark.parametrize("kind, words", [
    ("ledger", "launches of ledger, world 8, stage 1 even step: found 3, expected 2"),
    ("line of a ledger", "found 2, expected 1, the sum of its lines"),
    ("rate", "rates.json: edited"),
    ("page", "README.md: found"),
    ("result", "result.json: found"),
    ("more ledgers", "ledgers: found ['ledger', 'other']"),
    ("place", "track: found 8xGPU, expected none"),
])
def test_check_finds_what_was_damaged(copy, kind, words):
    damage(first(copy), kind)
    assert words in check(copy)


def test_a_rate_that_was_edited_changes_what_follows(copy):
    """Not the hash alone: prices are made again from the rates that are there."""
    damage(first(copy), "rate")
    assert '"run_s"' in check(copy)


def test_a_source_that_is_not_the_ledgers_is_found(tmp_path):
    (tmp_path / "records").mkdir()
    ledger = write_ledger(tmp_path / "today", source_sha256="0" * 64)
    new(tmp_path / "records", "Rehearsal", ledger, RATES, "--date=2026-01-01")
    assert "train_gpt.py does not hash to the source_sha256" in check(tmp_path / "records")


def run_log(folder: Path) -> Path:
    folder.mkdir()
    (folder / "log.jsonl").write_text("{}\n")
    return folder / "log.jsonl"


@pytest.mark.parametrize("given, words", [
    ("no rates", "a table of rates"),
    ("no ledger", "at least one"),
    ("two tables", "one, for all ledgers"),
    ("same name", "another name than ledger"),
    ("a run", "runs make the other kinds"),
    ("missing", "a ledger or a table of rates"),
    ("other card", "one with rates"),
    ("other format", "format of ledger"),
])
def test_what_makes_no_prediction_is_refused(tmp_path, given, words):
    (tmp_path / "records").mkdir()
    ledger = write_ledger(tmp_path / "today")
    files = {
        "no rates": [ledger], "no ledger": [RATES], "two tables": [ledger, RATES, RATES],
        "same name": [ledger, ledger, RATES], "a run": [run_log(tmp_path / "run"), RATES],
        "missing": [tmp_path / "none.json", RATES],
        "other card": [write_ledger(tmp_path / "other", card="H99"), RATES],
        "other format": [write_ledger(tmp_path / "format", format=7), RATES]}
    with pytest.raises(ToolError, match=words):
        new(tmp_path / "records", "Rehearsal", *files[given])
    assert not any((tmp_path / "records").glob("[0-9]*")), "a record is left behind"


def test_without_the_arithmetic_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(prediction, "PRICE", tmp_path / "price.py")
    prediction.price_tool.cache_clear()
    with pytest.raises(ToolError, match="use a whole checkout"):
        prediction.price_tool()
    prediction.price_tool.cache_clear()

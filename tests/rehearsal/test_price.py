"""The price: small ledgers priced by hand, random timelines against longest paths, mistakes, measured runs."""
import copy
import gzip
import json
import random

import price
import pytest

# Round rates: a card that does 100 TFLOP/s and 1 TB/s, starts a kernel in 3 us and sends 100 GB/s after 20 us.
ROUND_RATES = dict(bfloat16=100e12, float8=200e12, memory=1e12, transposing=0.5e12, FA2=50e12, FA3=100e12,
                   special=1e12, issue=1e11, link=100e9, host_link=10e9)
FIXED = dict(launch_floor=3e-6, link_latency=20e-6, slack=1.25, fused_pass=0.5)
MS_OF_GB = 1.25                          # of a memory-bound kernel on that card, slack included


def rates(**changes) -> dict:
    kinds = ROUND_RATES | changes
    card = {}
    for kind, rate in kinds.items():
        card[kind] = dict(peak=2 * rate, share=0.5, unit="", source="made up")
    fixed = {name: dict(value=value, unit="", source="made up") for name, value in FIXED.items()}
    return dict(fixed=fixed, cards=dict(round=dict(rates=card)))


def generated(name: str = "triton_poi_fused_add", size: float = 1e9, **facts) -> dict:
    return dict(kind="generated", name=name, bytes=size, **facts)


def product(flops: float, size: float = 1.0, dtype: str = "bfloat16", name: str = "aten.mm", m: int = 1024,
            n: int = 64, k: int = 64, batch: int = 1) -> dict:
    return dict(kind="product", name=name, dtype=dtype, bytes=size, flops=flops, m=m, n=n, k=k, batch=batch)


def attention(flops: float, direction: str = "forward", tokens: int = 1024) -> dict:
    return dict(kind="attention", name=f"attention_{direction}", bytes=1.0, flops=flops, tokens=tokens)


# A million programs of 4 warps: 100 instructions, of which a body of 30 turns 50 times and one of 10 five times.
LOOPS = [dict(instructions=30, special=2, trips=50), dict(instructions=10, special=0, trips=5)]
KERNELS = dict(
    move=generated(),
    eager=dict(kind="eager", name="aten.index_put_", bytes=1e9),
    tiny=generated(size=1e6),
    turn=generated("triton_poi_fused_t", block=dict(XBLOCK=32, YBLOCK=32)),
    think=generated("triton_red_fused_exp", instructions=100, special=40, warps=4, programs=10**6, loops=[]),
    loop=generated("triton_red_fused_sum", instructions=100, special=2, warps=4, programs=10**6, loops=LOOPS),
    rows=dict(kind="triton", name="add_rows_kernel", bytes=1.0, instructions=250, special=0, warps=4,
              programs=10**6, loops=[dict(instructions=80, special=0)]),
    mm=product(1e12),
    bytes_mm=product(1e12, size=20e9),
    small_mm=product(1e11),
    fused_mm=dict(product(1e12), fused_bytes=20e9),
    scaled_mm=product(1e12, dtype="float8_e4m3fn", name="aten._scaled_mm", m=64, k=1024),
    flash=attention(1e12),
    flash_back=attention(2e12, "backward"),
    upload=dict(kind="copy", name="aten._to_copy", bytes=1e8))


def phases_of(even: list, odd: list | None = None) -> dict:
    phases = {"stage 1 even step": dict(timeline=even)}
    if odd is not None:
        phases["stage 1 odd step"] = dict(timeline=odd)
    return phases


def ledger(even: list, odd: list | None = None, world: str = "8", segments=None, kernels=KERNELS) -> dict:
    """Of one stage, with these timelines."""
    walked = dict(phases=phases_of(even, odd), segments=segments or {})
    return dict(format=price.FORMAT, card="round", kernels=kernels, worlds={world: walked},
                steps={"stage 1": dict(even=251, odd=251)})


def priced(*timelines: list, kind: str = "FA2", use: dict = rates(), **of_ledger) -> dict:
    """The stage that a price finds."""
    found = price.price(ledger(*timelines, **of_ledger), use)
    world, by_attention = found["worlds"].popitem()
    return by_attention[kind]["stages"]["stage 1"]


def run(kernel: str, count: int = 1) -> list:
    return ["run", kernel, count]


# ------------------------------------------------------------------------------------------------ one kernel

@pytest.mark.parametrize("kernel, part, ms", [
    ("move", "memory-bound kernels", 1.25),
    ("eager", "memory-bound kernels", 1.25),
    ("turn", "memory-bound kernels", 2 * 1.25),
    ("upload", "memory-bound kernels", 10 * 1.25),
    ("mm", "products", 10 * 1.25),
    ("bytes_mm", "products", 20 * 1.25),
    ("scaled_mm", "products", 5 * 1.25),
    ("flash", "attention", 20 * 1.25),
    # 40 special functions of 32 threads each at 10^12 a second, or instructions at 10^11
    ("think", "memory-bound kernels", 4e6 * 40 * 32 / 1e9 * 1.25),
    ("loop", "memory-bound kernels", 4e6 * (100 + 30 * 49 + 10 * 4) / 1e8 * 1.25),
    ("rows", "memory-bound kernels", 4e6 * 250 / 1e8 * 1.25),
])
def test_a_kernel_takes_what_it_asks_most_of(kernel, part, ms):
    found = priced([run(kernel)])["even"]
    assert found["ms"] == pytest.approx(ms)
    paid = {name: value for name, value in found["parts"].items() if value}
    assert paid == {part: pytest.approx(ms)}


def test_special_functions_in_a_loop_are_counted_as_often_as_it_turns():
    card = price.Card(rates(), "round")
    asked = price.asked_of_card(KERNELS["loop"], card, "FA2")
    assert asked["special"] == pytest.approx(4e6 * 32 * (2 + 2 * 49) / 1e12)


def test_each_kind_of_attention_has_its_rate():
    timeline = [run("flash"), run("flash_back")]
    times = [priced(timeline, kind=kind)["mean"]["ms"] for kind in ("FA2", "FA3")]
    assert times == pytest.approx([60 * 1.25, 30 * 1.25])


def test_a_product_pays_its_share_of_the_pass_that_it_spares():
    """1 ms of arithmetic, and half of the 20 ms that a pass of its own would take; an older table has no share."""
    card = price.Card(rates(), "round")
    alone = price.asked_of_card(KERNELS["mm"], card, "FA2")["bfloat16"]
    spared = card.seconds("memory", KERNELS["fused_mm"]["fused_bytes"])
    assert price.asked_of_card(KERNELS["fused_mm"], card, "FA2")["bfloat16"] == pytest.approx(alone + spared / 2)
    older = rates()
    del older["fixed"]["fused_pass"]
    assert priced([run("mm")], use=older)["mean"]["ms"] == priced([run("mm")])["mean"]["ms"]
    with pytest.raises(price.PriceError, match="fused_pass"):
        priced([run("fused_mm")], use=older)


def test_what_the_launch_floor_adds_is_told_apart():
    """Two kernels of 1 us (1.25 with slack) and one of 1 ms: the floor of 3 us adds 1.75 us twice."""
    found = priced([run("tiny", 2), run("move")])["even"]
    assert found["parts"]["launches"] == pytest.approx(2 * 0.00175)
    assert found["parts"]["memory-bound kernels"] == pytest.approx(1.25 + 2 * 0.00125)
    assert found["ms"] == pytest.approx(1.25 + 2 * 0.003)


def test_a_card_without_a_rate_is_refused():
    """A card without fp8 cannot run a ledger with fp8 products; a card without FA3 is priced with FA2 alone."""
    few = rates()
    del few["cards"]["round"]["rates"]["float8"], few["cards"]["round"]["rates"]["FA3"]
    with pytest.raises(price.PriceError, match="float8.*\n.*\n.*\n.*--card=round"):
        priced([run("scaled_mm")], use=few)
    assert list(price.price(ledger([run("mm")]), few)["worlds"]["8"]) == ["FA2"]


DAMAGED = {                              # by what is said of it: what is taken away, and of what
    "no kernels": ("ledger", "kernels"), "no steps": ("ledger", "steps"), "no worlds": ("ledger", "worlds"),
    "no fixed": ("rates", "fixed"), "no cards": ("rates", "cards"), "no slack": ("fixed", "slack")}


@pytest.mark.parametrize("said", DAMAGED)
def test_a_damaged_ledger_or_table_is_refused_by_name(said):
    damaged, key = DAMAGED[said]
    made, use = ledger([run("move")]), rates()
    del dict(ledger=made, rates=use, fixed=use["fixed"])[damaged][key]
    with pytest.raises(price.PriceError, match=f"found: +{said}\n"):
        price.price(made, use)


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(price.PriceError, match="rate of 'memory' on round\n.*0"):
        price.price(ledger([run("move")]), rates(memory=0.0))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", gzip.compress(b"{}" * 99, mtime=0)[:20]])
def test_a_file_that_is_no_object_is_refused(tmp_path, content):
    path = tmp_path / ("trace.json.gz" if content[:2] == b"\x1f\x8b" else "ledger.json")
    path.write_bytes(content)
    with pytest.raises(price.PriceError, match=path.name):
        price.load(path)


# ------------------------------------------------------------------------------------------------ two streams

def collective(label: int, gigabytes: float, name: str = "all_gather_into_tensor", group: str = "nccl") -> list:
    return ["collective", label, name, gigabytes * 1e9, "bfloat16", group]


MS_OF_SENT_GB = 1000 * 7 / 8 / 100       # 7/8 of a gigabyte at 100 GB/s


def test_a_collective_hides_behind_kernels_until_it_is_waited_for():
    """It sets off at 1.25 ms, travels 0.02 + 8.75 ms, and meets 5 ms of kernels."""
    found = priced([run("move"), collective(1, 1.0), run("move", 4), ["wait", 1], run("move")])["even"]
    exposed = 0.02 + MS_OF_SENT_GB - 5.0
    assert found["parts"]["exposed communication"] == pytest.approx(exposed)
    assert found["ms"] == pytest.approx(7.5 + exposed)


def test_a_collective_that_is_done_costs_nothing():
    found = priced([collective(1, 0.1), run("move"), ["wait", 1]])["even"]
    assert found["parts"].get("exposed communication", 0) == 0
    assert found["ms"] == pytest.approx(1.25)


def test_collectives_follow_each_other():
    """The second is waited for first: it comes after the whole of the first."""
    found = priced([collective(1, 1.0), collective(2, 1.0), ["wait", 2], ["wait", 1]])["even"]
    assert found["ms"] == pytest.approx(2 * (0.02 + MS_OF_SENT_GB))


def test_a_sum_for_all_crosses_twice_and_other_threads_cross_elsewhere():
    twice = priced([collective(1, 1.0, "all_reduce"), ["wait", 1]])["even"]
    assert twice["ms"] == pytest.approx(0.02 + 2 * MS_OF_SENT_GB)
    elsewhere = priced([collective(1, 1.0, group="gloo"), ["wait", 1], run("move")])["even"]
    assert elsewhere["ms"] == pytest.approx(1.25)


def test_rows_fetched_in_an_odd_step_are_waited_for_in_the_even_one():
    """The odd step launches 8.77 ms of rows and ends 1.25 ms later; the even step waits for the rest."""
    even = [["wait", "before 9"], run("move"), collective(9, 0.1), ["wait", 9]]
    odd = [collective(9, 1.0), run("move")]
    found = priced(even, odd)
    own_wait = 0.02 + 0.1 * MS_OF_SENT_GB
    left = 0.02 + MS_OF_SENT_GB - 1.25
    assert found["odd"]["ms"] == pytest.approx(1.25)
    assert found["even"]["parts"]["exposed communication"] == pytest.approx(left + own_wait)


def test_segments_and_repetitions_are_written_out():
    segments = {"forward": [run("move"), run("mm")], "backward": [run("eager", 2)]}
    micro_batch = ["repeat", 3, [["segment", "forward"], ["segment", "backward"]]]
    rolled = priced([micro_batch, run("move")], world="1", segments=segments)["even"]
    flat = priced(3 * [run("move"), run("mm"), run("eager"), run("eager")] + [run("move")], world="1")["even"]
    assert rolled["parts"] == pytest.approx(flat["parts"])
    assert rolled["ms"] == pytest.approx(10 * 1.25 + 3 * 12.5)


def longest_path(timeline: list) -> float:
    """ms until the last kernel ends: the timeline as a graph of what waits for what, solved backwards from its end."""
    ends = {None: 0.0}                   # by place in the timeline

    def after(place: int, kinds: tuple) -> int | None:
        """The last place before this one with an item of these kinds."""
        found = [at for at in range(place) if timeline[at][0] in kinds]
        return found[-1] if found else None

    def end(place: int | None) -> float:
        if place not in ends:
            kind, *item = timeline[place]
            ready = end(after(place, ("run", "wait")))
            if kind == "run":
                ends[place] = ready + 1.25 * item[1]
            elif kind == "collective":
                on_link = end(after(place, ("collective",)))
                ends[place] = max(ready, on_link) + 0.02 + item[2] / 1e9 * MS_OF_SENT_GB
            else:
                launch = next(at for at in range(place) if timeline[at][:2] == ["collective", item[0]])
                ends[place] = max(ready, end(launch))
        return ends[place]

    return end(after(len(timeline), ("run", "wait")))


@pytest.mark.parametrize("seed", range(20))
def test_random_timelines_take_their_longest_path(seed):
    draw = random.Random(seed)
    timeline = [run("move")]
    under_way = []
    for label in range(60):
        kind = draw.choice(["run", "run", "collective", "wait"])
        if kind == "collective":
            timeline.append(collective(label, draw.uniform(0.01, 0.5)))
            under_way.append(label)
        elif kind == "wait" and under_way:
            timeline.append(["wait", under_way.pop(draw.randrange(len(under_way)))])
        else:
            timeline.append(run(draw.choice(["move", "eager"]), draw.randrange(1, 4)))
    for label in under_way:
        timeline.append(["wait", label])                                      # so that steps do not touch each other
    found = priced(timeline)["even"]
    assert found["ms"] == pytest.approx(longest_path(timeline))
    assert sum(found["parts"].values()) == pytest.approx(found["ms"])


# ------------------------------------------------------------------------------------------------ stages and the run

def two_stages() -> dict:
    """Even steps of 1 and 3 GB, odd ones of 2 and 4; a run has 8 and 7, 2 and 1, and a last stage without steps."""
    found = ledger([run("move")], [run("move", 2)])
    phases = found["worlds"]["8"]["phases"]
    phases["stage 2 even step"] = dict(timeline=[run("move", 3)])
    phases["stage 2 odd step"] = dict(timeline=[run("eager", 4)])
    phases["validation final"] = dict(timeline=[run("move", 1000)])
    return found | dict(steps=STEPS_OF_TWO)


STEPS_OF_TWO = {"stage 1": dict(even=8, odd=7), "stage 2": dict(even=7, odd=8), "stage 3": dict(even=2, odd=1)}


def test_a_run_is_the_sum_of_its_steps():
    found = price.price(two_stages(), rates())["worlds"]["8"]["FA2"]
    even, odd = STEPS_OF_TWO["stage 1"].values()
    more_even, more_odd = STEPS_OF_TWO["stage 2"].values()
    assert found["stages"]["stage 1"]["mean"]["ms"] == pytest.approx((even + 2 * odd) * MS_OF_GB / 15)
    seconds = (even + 2 * odd + 3 * more_even + 4 * more_odd) * MS_OF_GB / 1000
    assert found["run_s"] == pytest.approx(seconds)
    assert sum(found["run_parts_s"].values()) == pytest.approx(found["run_s"])


def test_the_dearest_lines_come_first_by_name():
    found = price.price(two_stages(), rates())["worlds"]["8"]["FA2"]["dearest"]
    assert [line["name"] for line in found] == ["triton_poi_fused_add", "aten.index_put_"]
    moved = 8 + 2 * 7 + 3 * 7
    assert [line["s"] for line in found] == pytest.approx([moved * MS_OF_GB / 1000, 32 * MS_OF_GB / 1000])
    assert found[1]["ms"] == {"stage 2": pytest.approx(32 * MS_OF_GB / 15)}


def test_a_product_has_one_name_in_all_stages():
    """T stands for the tokens of a micro-batch, which plain attention sees once and paired attention twice."""
    names = []
    for slot in (1024, 4096):
        kernels = dict(plain=attention(1, tokens=slot), paired=attention(1, tokens=2 * slot),
                       down=product(1, m=slot, n=256, k=768), grad=product(1, m=3072, n=256, k=slot, batch=5))
        lines = priced([run(label) for label in kernels], kernels=kernels)["lines"]
        names.append({name for name, part, ms in lines if part == "products"})
    expected = {"aten.mm bfloat16 (T, 256, 768)", "aten.mm bfloat16 5 x (3072, 256, T)"}
    assert names == [expected, expected]


# ------------------------------------------------------------------------------------------------ what a change costs

def cells(page: str, first: str) -> list[str]:
    """The other cells of the row that begins with this one."""
    row, = (line for line in page.splitlines() if line.startswith(f"| {first} "))
    return [part.strip() for part in row.strip("|").split("|")][1:]


def test_a_change_is_priced_by_stage_and_by_line_where_both_have_it():
    """One GB more in each even step of stage 1, 8 of 15; the other ledger has no stage 2."""
    idea = two_stages()
    phases = idea["worlds"]["8"]["phases"]
    phases["stage 1 even step"] = dict(timeline=[run("move"), run("turn")])
    del phases["stage 2 even step"], phases["stage 2 odd step"]
    turned = 2 * MS_OF_GB                                                     # by tiles: at half the rate
    page = price.difference(*(price.price(found, rates()) for found in (two_stages(), idea)))
    was = (8 + 2 * 7) * MS_OF_GB / 15
    assert cells(page, "FA2, before")[0] == f"{was:.2f}"
    assert cells(page, "FA2, now")[0] == f"{was + 8 / 15 * turned:.2f}"
    assert cells(page, "FA2, more") == [f"{8 / 15 * turned:+.2f}", f"{8 * turned / 1000:+.2f}"]
    assert cells(page, "triton_poi_fused_t") == ["memory-bound kernels", f"{8 * turned / 1000:+.2f}"]
    assert "triton_poi_fused_add" not in page and "stage 2" not in page
    headings = [line for line in page.splitlines() if line and not line.startswith("|")]
    assert headings and all("redict" in line for line in headings)


def test_worlds_that_only_one_ledger_has_are_not_compared():
    one, eight = (price.price(ledger([run("move")], world=world), rates()) for world in "18")
    assert price.difference(one, eight).strip() == ""


# ------------------------------------------------------------------------------------------------ mistakes show

def spoiled(mistake: str) -> float:
    """ms of a step whose ledger a mistake has changed."""
    kernels = copy.deepcopy(KERNELS)
    first = run("move")
    wait = ["wait", 1]
    timeline = [first, collective(1, 1.0), run("small_mm"), wait, run("think")]
    if mistake == "no wait":
        timeline.remove(wait)
    if mistake == "waits at once":
        timeline.remove(wait)
        timeline.insert(2, wait)
    if mistake == "bytes":
        kernels["move"]["bytes"] *= 2
    if mistake == "launched twice":
        timeline.insert(0, first)
    if mistake == "other type":
        kernels["small_mm"]["dtype"] = "float8_e5m2"
    if mistake == "special functions":
        kernels["think"]["special"] *= 2
    if mistake == "warps":
        kernels["think"]["warps"] *= 2
    return priced(timeline, kernels=kernels)["even"]["ms"]


THOUGHT = 4e6 * 40 * 32 / 1e9 * 1.25     # ms of its special functions
MISTAKES = {                             # ms that each adds; a product of another type hides as well
    "none": 0.0, "no wait": 1.25 - 0.02 - MS_OF_SENT_GB, "waits at once": 1.25, "bytes": 1.25, "launched twice": 1.25,
    "other type": 0.0, "special functions": THOUGHT, "warps": THOUGHT}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_moves_the_price(mistake):
    """1.25 ms, a wait for the 8.77 ms behind them, which hide a product of 1.25 ms, and 6.4 ms of special functions."""
    right = 1.25 + 0.02 + MS_OF_SENT_GB + THOUGHT
    assert spoiled(mistake) == pytest.approx(right + MISTAKES[mistake])


# ------------------------------------------------------------------------------------------------ the table of rates

NEEDED = {"bfloat16", "float32", "memory", "transposing", "FA2", "special", "issue", "link", "host_link"}


def test_every_rate_has_a_share_of_a_peak_and_a_source():
    table = price.load(price.RATES)
    assert set(table["cards"]) == {"H100", "H200", "B200", "A100", "4090"}
    for name, card in table["cards"].items():
        assert NEEDED <= set(card["rates"]), name
        assert ("float8" in card["rates"]) == (card["capability"] >= [8, 9]), name
        assert ("FA3" in card["rates"]) == (card["capability"] == [9, 0]), name
        for kind, rate in card["rates"].items():
            assert 0 < rate["share"] < 1 and rate["peak"] > 0 and rate["unit"], (name, kind)
            assert has_source(rate), (name, kind)
    for name, fact in table["fixed"].items():
        assert fact["value"] > 0 and fact["unit"] and has_source(fact), name


def has_source(fact: dict) -> bool:
    """Something published, counted or measured; else the word assumed."""
    words = ("data sheet", "white paper", "published", "arXiv", "measured", "counted", "programming guide", "assumed",
             "NVLink", "PCIe")
    return any(word in fact["source"] for word in words)


# What the arithmetic was fitted with; a change needs a source, and a look at all that was priced before.
STARTED_FROM = dict(bfloat16=770e12, float8=1500e12, memory=3.05e12, transposing=2.28e12, FA2=225e12, FA3=450e12,
                    special=3.6e12, issue=132 * 4 * 1.7e9, link=370e9)


def test_the_card_of_the_record_has_the_constants_that_were_fitted():
    card = price.Card(price.load(price.RATES), "H100")
    for kind, rate in STARTED_FROM.items():
        assert card.rates[kind] == pytest.approx(rate, rel=1e-3), kind
    assert (card.launch_floor, card.link_latency, card.slack, card.fused_pass) == (3e-6, 20e-6, 1.197, 0.6)


# ------------------------------------------------------------------------------------------------ measured runs

def write_log(folder, step_ms: list) -> None:
    """A run whose steps take these times."""
    config = dict(num_scheduled_steps=len(step_ms), num_extension_steps=0, seed=0)
    lines = [dict(type="header", config=config, seed=0, world_size=8, attention="FA2 of torch", torch="2.13")]
    ms = 0.0
    for step, each in enumerate(step_ms):
        ms += each
        lines.append(dict(type="step", step=step + 1, train_time_ms=ms, train_loss=3.0))
    lines.append(dict(type="val", step=len(step_ms), val_loss=3.3, train_time_ms=ms))
    lines.append(dict(type="result", val_loss=3.3, train_time_ms=ms, steps=len(step_ms)))
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_log_is_measured_by_stage_away_from_its_ends(tmp_path):
    """Steps that settle and leave are 10 times as long here: none of them may count."""
    made = two_stages() | dict(steps={f"stage {number}": dict(even=60, odd=60) for number in (1, 2)})
    times = []
    for stage in range(2):
        for step in range(120):
            settled = 20 <= step < 115
            times.append((10 * stage + 30 + step % 2) * (1 if settled else 10))
    write_log(tmp_path / "run", times)
    found = price.measured_log(tmp_path / "run/log.jsonl", made)
    assert found["stages"]["stage 1"]["even"] == pytest.approx(30)
    assert found["stages"]["stage 2"]["odd"] == pytest.approx(41)
    assert found["run_s"] == pytest.approx(sum(times) / 1000)

    prediction = price.price(made, rates())
    page = price.measured_page(tmp_path / "run", made, prediction, "8", price.Card(rates(), "round"))
    ratio = 30 / MS_OF_GB
    assert f"| FA2  | stage 1 | even | 1.25         | 30.00       | {ratio:.2f} " in page


def test_a_log_of_other_ranks_is_refused(tmp_path):
    """Of 8 ranks, beside a prediction for one."""
    write_log(tmp_path / "run", [30.0] * 33)
    with pytest.raises(price.PriceError, match="8\n.*1\n.*--world=8"):
        price.measured_page(tmp_path / "run", two_stages(), {}, "1", price.Card(rates(), "round"))


def test_a_log_of_another_schedule_is_refused(tmp_path):
    write_log(tmp_path / "run", [30.0] * 50)
    with pytest.raises(price.PriceError, match="50\n.*33, as the ledger's run"):
        price.measured_log(tmp_path / "run/log.jsonl", two_stages())
    with pytest.raises(price.PriceError, match="the log of one run"):
        price.measured_log(tmp_path / "nowhere/log.jsonl", two_stages())


def write_trace(path, kernels: list[tuple[str, float, float]], steps=(2, 3)) -> None:
    """(name, start us, length us) of a GPU's kernels, and the profiler's steps."""
    events = [dict(ph="X", cat="cpu_op", name="aten::mm", ts=5, dur=1000)]
    for step in steps:
        events.append(dict(ph="X", cat="user_annotation", name=f"ProfilerStep#{step}", ts=0, dur=1))
    for name, start, length in reversed(kernels):
        events.append(dict(ph="X", cat="kernel", name=name, ts=start, dur=length))
    with gzip.open(path, "wt") as file:
        json.dump(dict(traceEvents=events), file)


TRACED = [run("move"), run("mm"), run("flash"), run("scaled_mm"), run("eager"), collective(1, 1.0), ["wait", 1]]
ONE_STEP = [("triton_poi_fused_add_17", 0, 1000), ("nvjet_tst_128x256", 1000, 8000), ("splitKreduce", 9000, 500),
            ("flash_fwd_kernel", 9500, 20000), ("sm90_xmma_gemm_e4m3", 29500, 6000),
            ("void at::native::index_put", 35500, 2000), ("ncclDevKernel_AllGather", 36500, 9000),
            ("something_new", 45000, 100)]


def traced_ledger() -> dict:
    return ledger(TRACED, TRACED)


def traced(tmp_path, step: list) -> dict:
    """Rows of two steps like this one beside the ledger's, by line: [predicted, measured, ratio]."""
    after = [(name, start + 10**6, length) for name, start, length in step]
    write_trace(tmp_path / "trace.json.gz", step + after)
    trace = price.read_trace(tmp_path / "trace.json.gz")
    found = price.beside_trace(trace, traced_ledger(), "8", price.Card(rates(), "round"), "FA2")
    return {line: values for line, *values in found}


def test_a_trace_stands_beside_the_prediction_kernel_by_kernel(tmp_path):
    """Products by their order, a split one with its reduction; of a collective what no kernel hides."""
    found = traced(tmp_path, ONE_STEP)
    assert {line: measured for line, (_, measured, _) in found.items()} == pytest.approx({
        "triton_poi_fused_add": 1.0, "aten.mm bfloat16 (T, 64, 64)": 8.5, "attention forward": 20.0,
        "aten._scaled_mm float8_e4m3fn (64, 64, T)": 6.0, "eager operations": 2.1, "exposed communication": 7.9})
    assert found["aten.mm bfloat16 (T, 64, 64)"] == pytest.approx([12.5, 8.5, 8.5 / 12.5])
    assert found["exposed communication"][0] == pytest.approx(0.02 + MS_OF_SENT_GB)


def test_products_of_another_number_are_one_line(tmp_path):
    found = traced(tmp_path, ONE_STEP + [("ampere_bf16_s16816gemm", 50000, 500)])
    predicted, measured, ratio = found["products"]
    assert (predicted, measured) == pytest.approx((12.5 + 6.25, 15.0))
    assert not any("aten" in line for line in found)


def test_a_trace_of_a_cpu_or_of_unknown_steps_is_refused(tmp_path):
    write_trace(tmp_path / "cpu.json.gz", [])
    with pytest.raises(price.PriceError, match="2 steps and 0 kernels"):
        price.read_trace(tmp_path / "cpu.json.gz")
    late = price.Trace([3000, 3001], ONE_STEP)
    with pytest.raises(price.PriceError, match="step of the trace\n.*3000"):
        price.beside_trace(late, traced_ledger(), "8", price.Card(rates(), "round"), "FA2")


# ------------------------------------------------------------------------------------------------ the command

def test_every_page_says_that_it_is_a_prediction(tmp_path, capsys):
    path, table = tmp_path / "ledger.json", tmp_path / "rates.json"
    path.write_text(json.dumps(two_stages()))
    table.write_text(json.dumps(rates()))
    assert price.main([str(path), f"--rates={table}"]) == 0
    page = capsys.readouterr().out
    headings = [line for line in page.splitlines() if line and not line.startswith("|")]
    assert headings and all("redict" in line for line in headings)
    assert f"{(8 + 2 * 7 + 3 * 7 + 4 * 8) * MS_OF_GB / 1000:.2f} " in page

    assert price.main([str(path), f"--rates={table}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "prediction"
    assert price.main([str(path), f"--rates={table}", "--card=H99"]) == 2
    assert "one of round" in capsys.readouterr().err
    assert price.main([str(tmp_path / "none.json")]) == 2
    assert "rehearse.py --update" in capsys.readouterr().err


def test_the_committed_ledger_is_priced_on_every_card_that_can_run_it():
    if not price.LEDGER.exists():
        pytest.skip("no ledger yet")
    ledger_of_today, table = price.load(price.LEDGER), price.load(price.RATES)
    found = price.price(ledger_of_today, table)
    for world, by_attention in found["worlds"].items():
        for attention, times in by_attention.items():
            for stage in times["stages"].values():
                parts = stage["mean"]["parts"].values()
                assert sum(parts) == pytest.approx(stage["mean"]["ms"]), (world, attention)
        assert by_attention["FA3"]["run_s"] < by_attention["FA2"]["run_s"]

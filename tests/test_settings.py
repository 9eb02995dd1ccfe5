"""Section 1: layers, stages, n-gram tables and presets; invalid ones are refused with a hint."""
import re
from dataclasses import FrozenInstanceError, fields, replace
from types import SimpleNamespace

import pytest
from common import ROOT, expect_error, preset_of, refuse

import train_gpt as tg

LAYERS = (tg.Layer("paired", value_embed=0), tg.Layer("plain", "long", value_embed=1, key_offset=True, save_as="skip"),
          tg.Layer("none", add_saved="skip"), tg.Layer("plain", save_as="backout"))
BAD_LAYERS = {                               # arguments of a layer -> what the message must contain
    "no such attention": (dict(attention="Plain"), "'Plain'", "`plain`"),
    "no such window": (dict(attention="plain", window="wide"), "'wide'", "`short` or `long`"),
    "a value table without attention": (dict(attention="none", value_embed=2), "value_embed=2",
                                        "value_embed only with attention"),
    "key offset of paired heads": (dict(attention="paired", key_offset=True), "'paired'", "only with plain attention"),
    "key offset without attention": (dict(attention="none", key_offset=True), "'none'", "only with plain attention"),
}

@pytest.mark.parametrize("name", BAD_LAYERS)
def test_Layer__refuses_features_that_exclude_each_other(name) -> None:
    """An invalid layer raises when it is constructed, so LAYERS cannot contain one. A layer is frozen."""
    arguments, *texts = BAD_LAYERS[name]
    with expect_error(tg.ConfigError, "LAYERS", *texts):
        tg.Layer(**arguments)
    with pytest.raises(FrozenInstanceError):
        LAYERS[0].window = "wide"

BAD_LAYER_TABLES = {                         # changes of LAYERS by index -> what the message must contain
    "kept twice": ({0: dict(save_as="skip")}, "['skip', 'skip', 'backout']", "different names"),
    "nothing for the head": ({3: dict(save_as="")}, "['skip']", "'backout'"),
    "a value table twice": ({3: dict(value_embed=1)}, "[0, 1, 1]", "0, 1, ... once each"),
    "a value table left out": ({1: dict(value_embed=2)}, "[0, 2]", "0, 1, ... once each"),
    "added by the layer that keeps it": ({1: dict(add_saved="skip")}, "layer 1", "an earlier layer saves, []"),
    "added above the layer that keeps it": ({1: dict(add_saved="backout")}, "layer 1", "an earlier layer saves, []"),
}

@pytest.mark.parametrize("name", BAD_LAYER_TABLES)
def test_check_layers__refuses_an_inconsistent_list(name, monkeypatch) -> None:
    """Each layer is valid by itself, but the saved outputs or value embeddings of the list do not match."""
    changes, *texts = BAD_LAYER_TABLES[name]
    layers = [replace(layer, **changes.get(i, {})) for i, layer in enumerate(LAYERS)]
    monkeypatch.setattr(tg, "LAYERS", tuple(layers))
    refuse(["--preset=tiny"], "LAYERS", *texts)

def test_check_layers__accepts_consistent_lists() -> None:
    """Lists as in ablations are valid too: a saved output that no layer adds, and no value embeddings."""
    for layers in (tg.LAYERS, LAYERS, [tg.Layer("plain", save_as=tg.BACKOUT)]):
        tg.check_layers(layers)
        tg.check_layers([replace(layer, add_saved="", value_embed=None, key_offset=False) for layer in layers])

def text_with(spec: tg.Stage | tg.NgramTable, **changes: object) -> str:
    """Return the flag text of a stage or table with other columns, including values that the class refuses."""
    return tg.format_spec(SimpleNamespace(**vars(spec) | changes))

STAGES = (tg.Stage(128, 1, 3, 1.0, (1.0, 0.5), (1.0, 0.0)), tg.Stage(256, 3, 7, 1.5, (1.0,), (1.0,), untie=True),
          tg.Stage(256, 4, 8, 1.0, (1.0,), (1.0,)))
BAD_STAGES = {                               # columns of the first stage -> what the message must contain
    "more weights at the end": (dict(mtp_end=(1.0, 0.5, 0.25)), "mtp_end=(1.0, 0.5, 0.25)", "as many MTP weights"),
    "as long a window for short as for long": (dict(short_window=3), "short_window=3", "short < long window"),
    "no window": (dict(short_window=0), "short_window=0", "1 <= short"),
    "a rate that is no number": (dict(lr_mul=float("nan")), "lr_mul=nan", "from 0 to 1,000"),
    "a weight below 0": (dict(mtp_start=(-1.0, 0.5)), "mtp_start=(-1.0, 0.5)", "from 0 to 1,000"),
    "a weight that is too large": (dict(mtp_end=(1.0, 1001.0)), "mtp_end=(1.0, 1001.0)", "from 0 to 1,000"),
}

def refuse_stages(changes: dict[str, object], texts: list[str]) -> None:
    """Check that --stages with these columns in the first stage is refused."""
    first, *others = STAGES
    text = ";".join([text_with(first, **changes), *map(tg.format_spec, others)])
    refuse(["--preset=tiny", f"--stages={text}"], "--stages", *texts)

@pytest.mark.parametrize("name", BAD_STAGES)
def test_Stage__refuses_invalid_columns(name) -> None:
    """The constructor raises, and a flag with the same stage raises an error with the same texts."""
    changes, *texts = BAD_STAGES[name]
    with expect_error(tg.ConfigError, "--stages", "correct the stage", *texts):
        replace(STAGES[0], **changes)
    refuse_stages(changes, texts)

@pytest.mark.parametrize("changes, texts", [
    (dict(batch_tokens=250), ["250", "batch_tokens: a multiple of 128"]),
    (dict(batch_tokens=0), ["batch_tokens: a multiple of 128"]), (dict(untie=True), ["`untie` in at most one"])],
    ids=str)
def test_check_config__refuses_stages_that_do_not_fit_the_settings(changes, texts) -> None:
    """The batch is not a multiple of 16 tokens per sequence, or two stages untie."""
    refuse_stages(changes, texts)

TABLE = tg.NgramTable("trigram_embed", 3, 100)
NO_ATTENTION = min(set(range(len(tg.LAYERS) + 1)) - set(tg.ATTENTION_LAYERS))
BAD_TABLES = {                               # columns of an n-gram table -> what the message must contain
    "no such order": (dict(order=5), f"order: one of {list(tg.NGRAM_FACTORS)}"),
    "a layer without attention": (dict(layer=NO_ATTENTION), f"layer={NO_ATTENTION}", "a layer with attention"),
    "an unknown location": (dict(location="disk"), "disk", "location: one of ('device', 'host')"),
    "signs that are no switch": (dict(signs=2), "signs=2", "signs: 0 or 1"),
    "an unknown update_every": (dict(update_every=8), "update_every=8", "1, 2 or 4 steps"),
    "a single row": (dict(rows=1), "rows=1", "at least 2", "no n-gram"),
    "too many rows": (dict(rows=2**31), "below 2^31"),
    "a rate that is no number": (dict(lr_mul=float("nan")), "lr_mul=nan", "lr and wd from 0"),
    "a weight decay below 0": (dict(wd_mul=-1.0), "wd_mul=-1.0", "lr and wd from 0"),
    "a second moment that grows": (dict(beta2=1.5), "beta2=1.5", "beta2 from 0 to 1"),
    "a label that no file is named by": (dict(label="4-gram_embed"), "letters, digits and _"),
    "a label without its ending": (dict(label="small"), "ends with _embed"),
    "a label of the recipe": (dict(label="value_embed"), "a label other than the built-in ones"),
}

def refuse_tables(changes: dict[str, object], texts: list[str]) -> None:
    """Check that --tables with these columns in the second table is refused."""
    text = f"{tg.format_spec(replace(TABLE, label='other_embed'))};{text_with(TABLE, **changes)}"
    refuse(["--preset=tiny", "--adam_every=2", f"--tables={text}"], "--tables", *texts)

@pytest.mark.parametrize("name", BAD_TABLES)
def test_NgramTable__refuses_invalid_columns(name) -> None:
    """The constructor raises, and a flag with the same table raises an error with the same texts."""
    changes, *texts = BAD_TABLES[name]
    with expect_error(tg.ConfigError, "--tables", "correct the table", *texts):
        replace(TABLE, **changes)
    refuse_tables(changes, texts)

@pytest.mark.parametrize("changes, texts", [
    (dict(update_every=1), ["a multiple of adam_every=2"]),
    (dict(label="other_embed"), ["a label that no other table has"])], ids=str)
def test_check_config__refuses_tables_that_do_not_fit_the_settings(changes, texts) -> None:
    """A table is updated between two Adam updates, or two tables have the same label."""
    refuse_tables(changes, texts)

def test_parse_specs__columns_and_defaults() -> None:
    """Columns that are omitted have the defaults of NgramTable. The text of a value parses to the value."""
    layer = tg.ATTENTION_LAYERS[-1]
    cfg = tg.load_config(["--preset=tiny", f"--tables=a_embed 2 30; b_embed 4 50 {layer} 1 host 4 70 0 0.5"])
    assert cfg.tables == (tg.NgramTable("a_embed", 2, 30, None, 0, "device", 2, 37.5, 5.0, 0.95),
                          tg.NgramTable("b_embed", 4, 50, layer, 1, "host", 4, 70.0, 0.0, 0.5))
    assert tg.parse_specs("tables", tg.format_value(cfg.tables)) == cfg.tables
    assert replace(tg.load_config(["--preset=pocket_tables", "--tables="]), preset="pocket") == preset_of("pocket")

@pytest.mark.parametrize("rest", ["", " 70", " 70 0 0.5"])
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_parse_specs__refuses_a_rounding_mode_in_the_8th_column(mode, rest) -> None:
    """Earlier trainers had the rounding mode there, before lr, wd and beta2. The error for other words is different."""
    columns = "b_embed 4 50 7 1 host 4"
    refuse(["--preset=tiny", f"--tables=a_embed 2 30; {columns} {mode}{rest}"], "--tables: invalid 8th field",
           f"found:    {mode}", "a number", "always rounded to nearest", f"omit `{mode}`")
    refuse(["--preset=tiny", f"--tables={columns} down{rest}"], "--tables", "'b_embed 4 50 7 1 host 4 down",
           "update_every lr wd beta2")
    refuse(["--preset=tiny", f"--tables={columns} 70 0 0.5 1"], "--tables", "70 0 0.5 1", "update_every lr wd beta2")

@pytest.mark.recipe
def test_NGRAM_FACTORS__are_those_of_the_published_losses() -> None:
    """The multipliers are written here again, because the reference reads them from the trainer.

    Each one is odd and below 2^31, so that a product with it loses no bit.
    """
    assert tg.NGRAM_FACTORS == {
        2: ((36313, 27191), (48271, 30011)),
        3: ((17351, 60961, 45259), (58699, 39779, 26801)),
        4: ((50411, 22787, 64951, 38327), (43399, 56783, 20297, 61403))}
    for factors, sign_factors in tg.NGRAM_FACTORS.values():
        assert len(factors) == len(sign_factors)
        assert all(factor % 2 == 1 and 0 < factor < 2**31 for factor in factors + sign_factors)


# ---- presets and flags ----------------------------------------------------------------------------------------------
# Settings of the CPU presets that affect published losses.
POCKET = dict(val_tokens=65_536, val_batch_tokens=8192, max_doc_len=256, seqs_per_step=8, padded_vocab=0, bigram_rows=0,
              model_dim=96, num_heads=6, head_dim=16, attn_scale=0.8, tables=(), dtype="float32", head="plain",
              stages=tg.parse_specs("stages", "512 1 3 1 1,.5,.25 1,.5,0; 1024 3 7 1.52 1,.5 1,0; "
                                              "1536 5 11 1.73 1 1 untie; 1536 6 13 1 1 1"),
              num_scheduled_steps=520, num_extension_steps=20, window_block=8, final_long_window=20, cooldown_frac=0.55,
              lr_floor=0.1, normuon_lr=0.023, adam_every=2, adam_lr=0.008, seed=0, compile=0, val_every=180)
RACE = POCKET | dict(num_heads=2, head_dim=48, attn_scale=0.26666666666666666, num_scheduled_steps=190, adam_every=1,
                     stages=POCKET["stages"][1:],
                     tables=tg.parse_specs("tables", "trigram_embed 3 20480; fourgram_embed 4 20480"))
TINY = POCKET | dict(val_tokens=1024, val_batch_tokens=512, max_doc_len=24, model_dim=32, num_heads=2, window_block=4,
                     stages=tg.parse_specs("stages", "128 1 3 1 1,.5,.25 1,.5,0; 256 3 7 1.52 1,.5 1,0; "
                                                     "384 5 11 1.73 1 1 untie; 384 6 13 1 1 1"),
                     num_scheduled_steps=9, num_extension_steps=3, val_every=5)

@pytest.mark.recipe
@pytest.mark.parametrize("name, settings", [("pocket", POCKET), ("race", RACE), ("tiny", TINY)])
def test_PRESETS__have_the_settings_of_the_published_losses(name, settings) -> None:
    cfg = preset_of(name)
    assert {field: getattr(cfg, field) for field in settings} == settings

def test_PRESETS__race_is_pocket_with_other_settings_and_small_tables() -> None:
    """`race` shares its width and stages with `pocket`; its tables are small enough for class plain."""
    pocket, race, tables = map(preset_of, ("pocket", "race", "race_tables"))
    assert race.stages == pocket.stages[1:] and race.num_heads * race.head_dim == race.model_dim == pocket.model_dim
    assert max(table.rows for table in race.tables) <= 10 * 2048, "class plain"
    assert replace(tables, preset="race", tables=race.tables) == race
    assert tables.tables == preset_of("pocket_tables").tables

def test_Config__every_field_is_used() -> None:
    """The source reads each field somewhere after its declaration."""
    source = (ROOT / "train_gpt.py").read_text()
    for f in fields(tg.Config):
        assert re.search(rf"(cfg|self|end|flags)\.{f.name}\b|\"{f.name}\", (unset|0|-1)", source), f.name

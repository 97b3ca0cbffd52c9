"""Layouts: what is refused and with which repair, stage shares, and the picture. No torch, no processes."""

import re
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from neuronx_dist.model_shape import ModelShape, padded_heads, stage_layers
from neuronx_dist.pipeline.schedule import OneFOneB, WrittenSchedule, ZeroBubbleV
from neuronx_dist.planning.layout import (
    Layout,
    LayoutError,
    _elide,
    _free_name,
    _multiples_near,
    _near,
    format_bytes,
    format_count,
)
from tests.support.reviewed import assert_reviewed

SMOLLM = ModelShape(layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49152, max_positions=8192)
STUCK = WrittenSchedule("F0 B0 F1 B1", "F0 F1 B0 B1")  # stage 0 wants a gradient that stage 1 makes after F1
PLAIN = ModelShape(layers=8, heads=8, kv_heads=8, intermediate=512, vocab=256, max_positions=2048)


def the_problem(layout, config=None, **paths):
    with pytest.raises(LayoutError) as caught:
        layout.check(config, **paths)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


# (layout, config, what the message must hold: the numbers and the nearest values that work)
REFUSED = {
    "world": (
        dict(world_size=6, tp=4, global_batch=12),
        PLAIN,
        ["6 processes", "tp 4 × pp 1 = 4", "start 4 or 8 processes", "use tp 2"],
    ),
    "world, whatever tp": (
        dict(world_size=9, tp=2, pp=2),
        PLAIN,
        ["9 processes are not divisible by tp 2 × pp 2 = 4: start 8 or 12 processes"],
    ),
    "world, sequences split": (
        dict(world_size=12, tp=8, sequence_parallel=True, seq_len=16),
        ModelShape(intermediate=480),
        ["12 processes", "use tp 4"],
    ),
    "heads": (
        dict(world_size=2, tp=2),
        SMOLLM,
        ["3 key/value heads", "9 query heads", "tp 2", "use tp 1", "12 query and 4 key/value heads"],
    ),
    "replicated heads": (
        dict(world_size=6, tp=6),
        SMOLLM,
        ["3 key/value heads", "use tp 3", "12 query and 3 key/value heads, each of the latter on 2 ranks"],
    ),
    "plain heads": (
        dict(world_size=2, tp=2),
        ModelShape(layers=2, heads=5, kv_heads=5),
        ["5 attention heads", "which makes it 6 heads"],
    ),
    "intermediate": (
        dict(world_size=4, tp=4),
        ModelShape(heads=4, kv_heads=4, intermediate=1002),
        ["intermediate_size 1002", "use tp 2", "make it 1000 or 1004"],
    ),
    "vocab": (
        dict(world_size=4, tp=4),
        ModelShape(heads=4, kv_heads=4, vocab=257),
        ["vocab_size 257", "use tp 1", "or pad_vocab (--pad-vocab), which adds 3 zero rows"],
    ),
    "batch": (
        dict(world_size=4, tp=2, num_microbatches=4, global_batch=30),
        PLAIN,
        ["batch of 30", "dp 2 × 4 microbatches = 8", "24 or 32", "use 3 or 5 microbatches"],
    ),
    "small batch": (
        dict(world_size=2, num_microbatches=4, global_batch=3),
        PLAIN,
        ["batch of 3", "use a global batch of 8"],
    ),
    "stages": (
        dict(world_size=16, pp=16),
        PLAIN,
        ["16 pipeline stages for 8 layers", "use pp 8"],
    ),
    "pieces": (
        dict(world_size=4, pp=4, num_microbatches=8, virtual_pipeline_size=4, global_batch=240),
        PLAIN,
        ["4 pipeline stages with 4 chunks each (Interleaved(", "for 8 layers", "use pp 2", "virtual_pipeline_size 2"],
    ),
    "pieces of a V": (
        dict(world_size=8, pp=8, schedule="zb_v"),
        PLAIN,
        ["8 pipeline stages with 2 chunks each (ZeroBubbleV(", "for 8 layers: use pp 4"],
    ),
    "schedule": (dict(world_size=2, pp=2, schedule="zbv"), PLAIN, ["no schedule 'zbv'", "'zb_h1', 'zb_v'"]),
    "schedule of another size": (
        dict(world_size=2, pp=2, num_microbatches=2, global_batch=2, schedule=WrittenSchedule("F0 B0", "F0 B0")),
        PLAIN,
        ["schedule: WrittenSchedule(num_stages=2, num_microbatches=1) does not fit 2 stages and 2 microbatches"],
    ),
    "schedule that waits for itself": (
        dict(world_size=2, pp=2, num_microbatches=2, global_batch=2, schedule=STUCK),
        PLAIN,
        ["WrittenSchedule(num_stages=2, num_microbatches=2) cannot run: deadlock: stage 0 at ", "stage 1 at "],
    ),
    "chunks of a schedule": (
        dict(world_size=2, pp=2, schedule="zb_v", virtual_pipeline_size=3),
        PLAIN,
        ["2 chunks on each stage, not 3 (virtual_pipeline_size)"],
    ),
    "chunks": (
        dict(world_size=1, virtual_pipeline_size=0),
        PLAIN,
        ["virtual_pipeline_size must be a positive integer"],
    ),
    "sequence": (
        dict(world_size=2, tp=2, sequence_parallel=True, seq_len=127),
        PLAIN,
        ["seq_len 127", "tp 2", "use seq_len 126 or 128"],
    ),
    "positions": (
        dict(world_size=1, seq_len=4096),
        PLAIN,
        ["seq_len 4096", "2048 positions"],
    ),
    "shared heads": (
        dict(world_size=1),
        ModelShape(heads=9, kv_heads=4),
        ["9 query heads", "4 key/value heads", "config"],
    ),
    "context": (dict(world_size=2, cp=2, seq_len=6), PLAIN, ["2 × cp 2 = 4", "use seq_len 4 or 8"]),
    "experts": (dict(world_size=2, ep=2, global_batch=2), PLAIN, ["ep 2", "use ep 1"]),
    "not positive": (dict(world_size=4, tp=0), PLAIN, ["tp must be a positive integer, not 0"]),
    "dtype": (dict(world_size=1, dtype="int8"), PLAIN, ["'int8'", "bfloat16"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_numbers_and_what_would_work(case):
    options, config, expected = REFUSED[case]
    message = the_problem(Layout(**options), config)
    for text in expected:
        assert text in message


@pytest.mark.parametrize("case", REFUSED)
def test_the_suggested_values_work(case):
    """Each value that a message of the form `use NAME value` proposes is accepted in its place."""
    options, config, _ = REFUSED[case]
    message = the_problem(Layout(**options), config)
    if "global_batch" not in options:
        options = {**options, "global_batch": 240}  # divisible whatever the new degree is
    fields = {"tp": "tp", "pp": "pp", "seq_len": "seq_len", "a global batch of": "global_batch"}
    fields["virtual_pipeline_size"] = "virtual_pipeline_size"
    for text, field in fields.items():
        for values in re.findall(rf"use {text} (\d+(?: or \d+)?)", message):
            for value in values.split(" or "):
                Layout(**{**options, field: int(value)}).check(config)
    for values in re.findall(r"use (\d+(?: or \d+)?) microbatches", message):
        for value in values.split(" or "):
            Layout(**{**options, "num_microbatches": int(value)}).check(config)
    for values in re.findall(r"start (\d+(?: or \d+)?) processes", message):
        for value in values.split(" or "):
            Layout(**{**options, "world_size": int(value)}).check(config)


@pytest.mark.parametrize(
    "options, config, flags",
    [
        (dict(world_size=6, tp=4, global_batch=12), PLAIN, "--tp 2"),  # tp 6 divides no heads
        (dict(world_size=2, tp=2), SMOLLM, "--pad-heads"),
        (dict(world_size=4, tp=2, num_microbatches=4, global_batch=30), PLAIN, "--microbatches 5"),
        (dict(world_size=2, num_microbatches=4, global_batch=3), PLAIN, "--pp 2 --microbatches 3"),
        (
            dict(world_size=8, pp=8, schedule="zb_v", num_microbatches=8, global_batch=8),
            PLAIN,
            "--pp 4 --microbatches 4",
        ),
        (dict(world_size=2, pp=2, schedule=STUCK, num_microbatches=2, global_batch=2), PLAIN, "without --schedule"),
        (dict(world_size=2, tp=2, sequence_parallel=True, seq_len=127), PLAIN, "without --sequence-parallel"),
        (
            dict(world_size=7, tp=2, seq_len=4096, dtype="int8"),
            PLAIN,
            "--tp 1 --global-batch 7 --seq-len 2048 --dtype float32",
        ),
        (dict(world_size=1), ModelShape(heads=9, kv_heads=4), ""),
    ],
)
def test_the_nearest_layout_that_works(options, config, flags):
    """The message ends with the flags of the nearest layout."""
    with pytest.raises(LayoutError) as caught:
        Layout(**options).check(config)
    assert caught.value.nearest == flags
    assert str(caught.value).endswith(f"\n  the nearest layout that works: {flags}") == bool(flags)


def test_the_nearest_of_many_layouts_is_found_in_time():
    start = time.process_time()
    with pytest.raises(LayoutError, match="works: --tp 4 --pp 8 --global-batch 1024$"):
        Layout(1024, tp=3, pp=7, global_batch=1023, seq_len=128).check(PLAIN)
    assert time.process_time() - start < 1


def test_all_problems_come_at_once():
    layout = Layout(world_size=6, tp=4, pp=32, num_microbatches=2, global_batch=3, seq_len=127, sequence_parallel=True)
    with pytest.raises(LayoutError) as caught:
        layout.check(SMOLLM, data=["/no/such/folder"], out="/")
    text = str(caught.value)
    for part in ("6 processes", "32 pipeline stages", "key/value heads", "seq_len 127", "/no/such/folder", "out: /"):
        assert part in text
    assert text.count("\n  - ") == len(caught.value.problems)


def test_of_a_model_only_what_is_known_is_checked():
    layout = Layout(world_size=4, tp=4, pp=1, global_batch=4)
    for shape in (ModelShape(), ModelShape(heads=6), ModelShape(kv_heads=3), ModelShape(max_positions=layout.seq_len)):
        assert layout.problems(shape) == []
    for shape in (ModelShape(vocab=6), ModelShape(intermediate=6), ModelShape(heads=6, kv_heads=6)):
        assert len(layout.problems(shape)) == 1
    for axis in ("cp", "ep"):  # of layers that are not known anything may be said to be parallel
        split = Layout(world_size=2, global_batch=2, **{axis: 2})
        assert split.problems(ModelShape()) == [] and len(split.problems(ModelShape(layers=1))) == 1


def test_padded_heads_do_not_limit_the_tp_that_is_advised():
    options = dict(world_size=6, tp=4, global_batch=6)
    assert "use tp 3 or 6" in the_problem(Layout(**options, pad_heads=True), SMOLLM)


def test_a_padded_vocabulary_does_not_limit_the_tp_that_is_advised():
    shape = ModelShape(heads=12, kv_heads=12, vocab=97)
    options = dict(world_size=6, tp=4, global_batch=6)
    assert "use tp 3 or 6" in the_problem(Layout(**options, pad_vocab=True), shape)


def test_paths(tmp_path):
    layout = Layout(world_size=1)
    missing = tmp_path / "missing"
    assert str(missing) in the_problem(layout, data=[tmp_path, missing])
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    layout.check(out=tmp_path / "run")  # an empty folder may be written into
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    message = the_problem(layout, out=tmp_path / "run")
    assert str(tmp_path / "run-3") in message
    layout.check(data=[tmp_path], out=tmp_path / "run-3")


@pytest.mark.parametrize(
    "options, config",
    [
        (dict(world_size=1), None),
        (
            dict(world_size=4, tp=2, pp=2, num_microbatches=2, global_batch=8, seq_len=128, sequence_parallel=True),
            PLAIN,
        ),
        (dict(world_size=3, tp=3), SMOLLM),
        (dict(world_size=2, tp=2, pad_heads=True), SMOLLM),
        (dict(world_size=9, tp=9), ModelShape(heads=9, kv_heads=3)),  # each key/value head on three ranks
        (dict(world_size=4, tp=4), ModelShape(layers=2, heads=8, kv_heads=2, intermediate=8, vocab=8)),
        (dict(world_size=4, tp=4, pad_vocab=True), ModelShape(heads=4, kv_heads=4, vocab=50257)),
        (dict(world_size=8, cp=2, ep=2, global_batch=4), None),
        (dict(world_size=8, pp=8), PLAIN),
        (dict(world_size=1, seq_len=2048), PLAIN),  # as long as it may be
    ],
)
def test_accepted(options, config):
    layout = Layout(**options)
    layout.check(config)
    assert layout.mesh().dp == layout.dp


@pytest.mark.parametrize(
    "heads, kv_heads, tp, expected",
    [
        (9, 3, 2, (12, 4, 1)),
        (9, 3, 3, (9, 3, 1)),
        (9, 3, 4, (12, 4, 1)),
        (5, 5, 2, (6, 6, 1)),
        (32, 8, 4, (32, 8, 1)),
        # Beyond the key/value heads these are replicated, and only groups of query heads are padded.
        (8, 1, 4, (8, 1, 4)),
        (64, 8, 32, (64, 8, 4)),
        (48, 8, 32, (64, 8, 4)),
        (9, 3, 6, (12, 3, 2)),
        (9, 3, 8, (16, 4, 2)),
        (3, 3, 4, (4, 4, 1)),
    ],
)
def test_padded_heads(heads, kv_heads, tp, expected):
    assert padded_heads(heads, kv_heads, tp) == expected


def test_no_other_padding_needs_fewer_heads():
    """Tried out: all numbers of key/value heads, and of query heads in a group, that can be laid on the ranks."""
    for kv_heads, group, tp in product(range(1, 7), range(1, 5), range(1, 13)):
        possible = []
        for kv, of_group in product(range(kv_heads, kv_heads + tp + 1), range(group, group + tp + 1)):
            local, rest = divmod(kv * of_group, tp)
            # The key/value heads that each rank's query heads need, which attention code expects in groups of one size.
            needed = [{head // of_group for head in range(r * local, (r + 1) * local)} for r in range(tp)]
            equal = not rest and len({len(heads) for heads in needed}) == 1 and local % len(needed[0]) == 0
            if equal and all(len(heads) == 1 or local // len(heads) == of_group for heads in needed):
                possible.append((kv * of_group + kv, kv * of_group, kv))
        heads = padded_heads(kv_heads * group, kv_heads, tp)
        assert (heads.heads, heads.kv_heads) == min(possible)[1:], (kv_heads, group, tp)
        assert heads.replicas == max(1, tp // heads.kv_heads)


@pytest.mark.parametrize(
    "layers, pp, sizes", [(8, 2, [4, 4]), (19, 4, [4, 5, 5, 5]), (30, 4, [7, 7, 8, 8]), (3, 3, [1, 1, 1]), (5, 1, [5])]
)
def test_stage_layers(layers, pp, sizes):
    stages = stage_layers(layers, pp)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_a_config_is_read_by_its_names():
    text = SimpleNamespace(num_hidden_layers=4, num_attention_heads=6, hidden_size=96, vocab_size=300)
    wrapped = SimpleNamespace(get_text_config=lambda: text)
    for config in (text, wrapped):
        shape = ModelShape.of(config)
        assert (shape.layers, shape.heads, shape.kv_heads, shape.vocab, shape.intermediate) == (4, 6, 6, 300, None)


def test_a_hugging_face_config():
    transformers = pytest.importorskip("transformers")
    shape = ModelShape.of(
        transformers.LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30)
    )
    assert (shape.layers, shape.heads, shape.kv_heads) == (30, 9, 3)
    assert ModelShape.of(transformers.GPT2Config(n_layer=7)).layers == 7


PICTURE = """\
8 ranks = pp 2 × dp 2 × tp 2

        ┌ dp 0 ┐ ┌ dp 1 ┐
stage 0 │ 0═1  │ │ 2═3  │  embedding, layers 0–3
stage 1 │ 4═5  │ │ 6═7  │  layers 4–7, norm, head
        └──────┘ └──────┘
═  tp: each layer's weights are split, and the sequence between layers
□  dp: each box sees other sequences, gradients are averaged, each keeps its part of the optimizer state (ZeRO-1)
↓  pp: microbatches go down and their gradients up; 20% of a step is waiting
a step: 2 replicas × 4 microbatches × 4 sequences of 128 tokens = 4,096 tokens"""


def test_picture():
    layout = Layout(
        world_size=8, tp=2, pp=2, sequence_parallel=True, zero1=True, num_microbatches=4, global_batch=32, seq_len=128
    )
    assert layout.picture(PLAIN) == PICTURE


V_PICTURE = """\
2 ranks = pp 2 × dp 1 × tp 1

        ┌ dp 0 ┐
stage 0 │  0   │  embedding, layers 0–1, layers 6–7, norm, head
stage 1 │  1   │  layers 2–3, layers 4–5
        └──────┘
↓  pp: microbatches go to stages 0 1 1 0 and their gradients back; 4% of a step is waiting (zb_v)
a step: 1 replica × 4 microbatches × 1 sequence of 1 tokens = 4 tokens"""


def test_the_picture_of_another_placement():
    assert Layout(2, pp=2, num_microbatches=4, global_batch=4, schedule="zb_v").picture(PLAIN) == V_PICTURE


def test_the_schedule_is_the_one_that_is_asked_for():
    sizes = dict(world_size=4, pp=4, num_microbatches=8, global_batch=8)
    assert Layout(**sizes).bubble == OneFOneB(4, 8).bubble
    assert Layout(**sizes, schedule="zb_v").bubble == ZeroBubbleV(4, 8).bubble < Layout(**sizes).bubble
    assert Layout(**sizes, virtual_pipeline_size=2).training_schedule.holders == [0, 1, 2, 3] * 2
    assert type(Layout(**sizes, schedule=ZeroBubbleV).training_schedule) is ZeroBubbleV


@pytest.mark.parametrize("world", [1, 4, 8, 16, 32, 64])
def test_a_picture_shows_every_rank_where_it_is(world):
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            for cp in (1, 2):
                if world % (tp * pp * cp):
                    continue
                layout = Layout(world_size=world, tp=tp, pp=pp, cp=cp, global_batch=64)
                rows = [row for row in layout.picture(width=10_000).splitlines() if row.startswith("stage")]
                ranks = [
                    [[int(rank) for rank in re.findall(r"\d+", box)] for box in row.split("│")[1::2]] for row in rows
                ]
                mesh = layout.mesh()
                for stage, row in enumerate(ranks):
                    for replica, box in enumerate(row):
                        for rank in box:
                            at = mesh.coordinates(rank)
                            assert (at["pp"], at["dp"]) == (stage, replica)
                assert sorted(rank for row in ranks for box in row for rank in box) == list(range(world))


@pytest.mark.parametrize(
    "options", [dict(world_size=64), dict(world_size=512, tp=16, pp=8), dict(world_size=64, pp=64)]
)
def test_a_large_picture_leaves_out_the_middle(options):
    lines = Layout(**options).picture(width=100).splitlines()
    drawn = [line for line in lines if "│" in line]
    assert len(drawn) <= 16 and all(len(line) <= 100 for line in drawn)
    assert "…" in drawn[0] or any("⋮" in line for line in drawn)
    assert str(options["world_size"] - 1) in drawn[-1]


def test_formats():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    assert [format_count(n) for n in (12, 12_345, 134_515_008, 7e9, 2e12)] == [
        "12",
        "12.3 K",
        "134.5 M",
        "7.0 B",
        "2.0 T",
    ]


def test_a_layout_of_many_ranks_costs_what_a_small_one_does():
    layout = Layout(world_size=102_400, tp=8, pp=16, num_microbatches=32, global_batch=25_600, seq_len=128)
    begin = time.process_time()
    assert layout.problems() == [] and layout.dp == 800
    assert "dp 799" in layout.picture(width=100) and "102399" in layout.picture(width=100)
    assert time.process_time() - begin < 0.05


# --- whole texts

TEXTS = {
    **REFUSED,
    "no value near": (dict(world_size=6, tp=4, pp=16), PLAIN, []),
    "sequences and a size": (dict(world_size=7, tp=2, cp=7, global_batch=1), ModelShape(intermediate=7), []),
    "several": (dict(world_size=6, tp=4, global_batch=7, seq_len=9, sequence_parallel=True), SMOLLM, []),
    "experts that do not divide": (dict(world_size=6, tp=2, ep=4, global_batch=3), None, []),
    "experts and sequences": (dict(world_size=20, tp=2, pp=2, cp=2, ep=5, global_batch=3), None, []),
    "sequences that do not divide": (dict(world_size=6, tp=2, cp=2), None, []),
    "all of the wrong kind": (dict(world_size=0, tp=1.5, pp=-1, cp=None, ep="2", seq_len=0, dtype="fp8"), None, []),
    "a schedule that is none": (dict(world_size=2, pp=2, schedule=3), PLAIN, []),
    "wide vocabulary": (dict(world_size=8, tp=8), ModelShape(heads=8, kv_heads=8, vocab=50257), []),
    "heads that tp cannot have": (dict(world_size=7, tp=7, global_batch=1), ModelShape(heads=6, kv_heads=6), []),
    "many sequences": (dict(world_size=8, tp=1, num_microbatches=3, global_batch=64), None, []),
}
PICTURES = {
    "one rank": (dict(world_size=1), None),
    "one layer a stage": (dict(world_size=3, pp=3, num_microbatches=3, global_batch=3), ModelShape(layers=3)),
    "sequences": (dict(world_size=8, tp=2, cp=2, global_batch=2), PLAIN),
    "wide": (dict(world_size=64, tp=16, zero1=True, global_batch=64, seq_len=8192), PLAIN),
    "many replicas": (dict(world_size=256, tp=2, global_batch=256, num_microbatches=2), None),
    "many stages": (dict(world_size=40, pp=20, num_microbatches=20, global_batch=40), ModelShape(layers=40)),
    "chunks": (
        dict(world_size=4, pp=4, num_microbatches=8, global_batch=8, virtual_pipeline_size=2),
        ModelShape(layers=9),
    ),
    "a schedule": (dict(world_size=2, pp=2, num_microbatches=2, global_batch=4, schedule=OneFOneB), PLAIN),
}


def test_every_refusal_in_full():
    def text(options, config):
        layout = Layout(**options)
        return str(LayoutError(layout.problems(config), layout.nearest(config)))

    texts = {name: text(options, config) for name, (options, config, _) in TEXTS.items()}
    assert all(" cannot work" in text and "\n  - " in text for text in texts.values())
    assert_reviewed(Path(__file__).with_name("expected_refusals.txt"), texts)


def test_every_picture_in_full():
    texts = {name: Layout(**options).picture(config, width=90) for name, (options, config) in PICTURES.items()}
    assert_reviewed(Path(__file__).with_name("expected_pictures.txt"), texts)


@pytest.mark.parametrize("unit, start, step", [(format_bytes, 1, 1024), (format_count, 1, 1000)])
def test_formats_change_their_unit_where_the_next_one_begins(unit, start, step):
    texts = [unit(value) for power in range(5) for value in (step**power - 1, step**power, -(step**power))]
    names = ["B", "KiB", "MiB", "GiB", "TiB"] if step == 1024 else ["", "K", "M", "B", "T"]
    assert [text.partition(" ")[2] for text in texts[1::3]] == names == [t.partition(" ")[2] for t in texts[2::3]]
    assert [text.partition(" ")[0] for text in texts[1::3]] == ["1", *["1.0"] * 4]
    assert [text.partition(" ")[2] for text in texts[3::3]] == names[:-1]


@pytest.mark.parametrize(
    "items, most, shown",
    [(3, 3, [0, 1, 2]), (4, 3, [0, None, 3]), (9, 9, [*range(9)]), (10, 9, [*range(7), None, 9])],
)
def test_the_middle_of_many_is_left_out(items, most, shown):
    assert _elide(range(items), most) == shown


def test_near_values_are_looked_for_below_and_above():
    assert _near(5, lambda n: True) == [4, 6] and _near(1, lambda n: True) == [2] and _near(5, lambda n: False) == []
    assert _near(8, lambda n: n in (1, 96)) == [1, 96] and _near(8, lambda n: n in (0, 97)) == []
    assert [_multiples_near(value, 4) for value in (3, 4, 9)] == [[4], [4, 8], [8, 12]]


def test_a_folder_without_a_name_is_free_as_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _free_name(Path("/")) == Path("/run-2") and _free_name(Path("a")) == Path("a-2")
    (tmp_path / "a-2").mkdir()
    (tmp_path / "a-3").mkdir()
    assert _free_name(tmp_path / "a") == tmp_path / "a-4"

"""Readings become rows that hold what is known of a call before it is read, apart from what the
reading said.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from farm.addons.predict.call_features import NAMES, describe, numbers_of
from farm.addons.predict.families import model_family, operator_family, operator_type
from farm.addons.predict.kernel_rules import KernelPlan, attention_options, products_of
from farm.addons.predict.query import training_set, write_dataset
from farm.addons.predict.tile_roofline import card_rates, tile_roofline
from farm.errors import UsageError
from farm.store.data_columns import DATASET
from farm.types.matrix_products import Products
from farm.types.variant import Variant
from tests.report import filled

H200 = card_rates("cuda", "NVIDIA H200")


def dataset_of(session, card="", torch=""):
    return training_set(session, card, torch)[0]


def test_a_row_is_a_tuple_with_its_figures(database):
    taken = filled.fill(database)
    with database.read() as session:
        found = dataset_of(session, "h200")
    assert len(found) == len(taken.capture.tuples)
    assert found.conditions.software.torch == "2.11.0+cu130"
    row = next(row for row in found.rows if row.call.operator == "Conv2d")
    watts = row.cost.energy_mj.value / row.cost.time_us.value * 1e3
    assert row.cost.mean_power_w == pytest.approx(watts)
    assert row.call.tile_roofline_us >= row.call.compute_us > 0
    assert [entry.name for entry in DATASET] == list(next(found.records()))
    assert numbers_of(found.calls).shape == (len(found), len(NAMES))


def test_the_key_is_of_the_readings(database):
    filled.fill(database)
    with database.read() as session:
        before = dataset_of(session)
    filled.fill(database, Variant("alexnet", 1, 64), created_at_s=1.8e9)
    with database.read() as session:
        after = dataset_of(session)
    assert before.key == dataclasses.replace(before, rows=before.rows[::-1]).key != after.key
    assert len(after.without(row.call.operator_id for row in before.rows)) == len(after) - len(
        before
    )


def test_two_versions_of_software_are_two_sets(database):
    filled.fill(database)
    filled.fill(
        database, software=dataclasses.replace(filled.SOFTWARE, torch="2.12.0+cu130"), prefix="b"
    )
    with database.read() as session:
        assert dataset_of(session, torch="2.12").conditions.software.torch == "2.12.0+cu130"
        with pytest.raises(UsageError, match=r"on NVIDIA H200 with torch 3") as refused:
            dataset_of(session, torch="3")
    assert "2.11.0+cu130, 2.12.0+cu130" in refused.value.next_step


def test_readings_with_tensors_in_slow_memory_are_left_out(database):
    filled.fill(database)
    with database.read() as session:
        before = dataset_of(session)
    filled.fill(
        database, protocol=filled.PROTOCOL.with_placement("in0"), created_at_s=1.8e9, whole=False
    )
    with database.read() as session:
        assert dataset_of(session).key == before.key


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_it_is_written_for_others(database, tmp_path, suffix):
    import pandas

    filled.fill(database)
    with database.read() as session:
        found = dataset_of(session)
    path = tmp_path / f"tuples{suffix}"
    write_dataset(found, path)
    read = pandas.read_parquet(path) if suffix == ".parquet" else pandas.read_csv(path)
    assert list(read.columns) == [entry.name for entry in DATASET]
    assert read.time_us.sum() == pytest.approx(sum(row.cost.time_us.value for row in found.rows))
    with pytest.raises(UsageError, match="unknown suffix"):
        write_dataset(found, tmp_path / "tuples.txt")


@pytest.mark.parametrize(
    ("short_name", "spec", "wanted"),
    [
        (
            "convolution",
            {
                "kind": "aten",
                "arguments": [{"tensor": 0}, {"tensor": 1}, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 2],
                "tensors": [{"shape": [4, 8, 16, 16], "dtype": "float32"}, {"shape": [6, 4, 3, 3], "dtype": "float32"}],
            },
            Products(4 * 8 * 8, 3, 36, 2),
        ),
        (
            "convolution_backward",
            {
                "kind": "aten",
                "arguments": [
                    *({"tensor": 0}, {"tensor": 1}, {"tensor": 2}, None, [1, 1], [1, 1], [1, 1]),
                    *(False, [0, 0], 1, [True, True, False]),
                ],
                "tensors": [
                    {"shape": [4, 6, 16, 16], "dtype": "float32"},
                    {"shape": [4, 8, 16, 16], "dtype": "float32"},
                    {"shape": [6, 8, 3, 3], "dtype": "float32"},
                ],
            },
            Products(4 * 16 * 16, 6, 72, 2),
        ),
        (
            "mm",
            {
                "kind": "aten",
                "arguments": [{"tensor": 0}, {"tensor": 1}],
                "tensors": [{"shape": [4, 5], "dtype": "float32"}, {"shape": [5, 8], "dtype": "float32"}],
            },
            Products(4, 8, 5),
        ),
        (
            "scaled_dot_product_attention",
            {
                "arguments": [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}],
                "tensors": [
                    {"shape": [2, 8, 16, 64], "dtype": "bfloat16"},
                    *[{"shape": [2, 8, 99, 64], "dtype": "bfloat16"}] * 2,
                ],
            },
            Products(16, 99, 64, 16),
        ),
        (
            "einsum",
            {
                "arguments": ["b i d, b j d -> b i j", {"tuple": [{"tensor": 0}, {"tensor": 1}]}],
                "tensors": [{"shape": [24, 512, 64], "dtype": "float32"}, {"shape": [24, 256, 64], "dtype": "float32"}],
            },
            Products(512, 256, 64, 24),
        ),
        (
            "einsum",
            {
                "arguments": ["ibh,hnd->ibnd", {"tensor": 0}, {"tensor": 1}],
                "tensors": [{"shape": [128, 8, 768], "dtype": "float32"}, {"shape": [768, 12, 64], "dtype": "float32"}],
            },
            Products(128 * 8, 12 * 64, 768),
        ),
        (
            "einsum",
            {
                "arguments": ["...i,ij", {"tensor": 0}, {"tensor": 1}],
                "tensors": [{"shape": [8, 4], "dtype": "float32"}, {"shape": [4, 4], "dtype": "float32"}],
            },
            None,
        ),
        (
            "mv",
            {
                "arguments": [{"tensor": 0}, {"tensor": 1}],
                "tensors": [{"shape": [4, 5], "dtype": "float32"}, {"shape": [5], "dtype": "float32"}],
            },
            Products(4, 1, 5),
        ),
        ("relu", {"arguments": [{"tensor": 0}], "tensors": [{"shape": [4], "dtype": "float32"}]}, None),
    ],
)  # fmt: skip
def test_what_an_operator_multiplies(short_name, spec, wanted):
    assert products_of(short_name, spec) == wanted


def test_products_of_modules_come_to_the_flops_that_torch_counts(database):
    taken = filled.fill(database, Variant("shufflenet_v2_x0_5", 1, 64))
    compared = 0
    for id_, spec in taken.capture.tuples.items():
        found = products_of(spec.short_name, json.loads(json.dumps(spec.to_json())))
        if found:
            assert found.flops == taken.costs[id_].flops, spec
            compared += 1
    assert compared > 10


def test_one_tile_more_than_a_wave_takes_another_wave():
    def time_us(tiles):
        products = Products(4096 * tiles, 128, 1024)
        return tile_roofline(H200, KernelPlan("float32", products.flops, 1), products).compute_us

    whole, more = time_us(33), time_us(34)
    assert more / whole > 34 / 33 + 0.02
    assert time_us(66) == pytest.approx(2 * whole)


def test_an_attention_whose_mask_does_not_lie_row_by_row_writes_its_scores_out():
    def attention(**mask):
        heads = {"role": "activation", "shape": [8, 12, 512, 64], "dtype": "bfloat16"}
        tensors = [heads] * 3 + [
            {"role": "activation", "shape": [1, 12, 512, 512], "dtype": "bfloat16", **mask}
        ]
        arguments = [{"tensor": place} for place in range(3)]
        spec = {
            "kind": "function",
            "tensors": tensors,
            "arguments": arguments,
            "keywords": {"attn_mask": {"tensor": 3}},
        }
        return describe(H200, "x", "scaled_dot_product_attention", spec, 6442450944, 31457280)

    fused, permuted = attention(), attention(stride=[12, 1, 6144, 12])
    assert (fused.masked, permuted.masked, fused.materialised, permuted.materialised) == (
        1.0,
        1.0,
        False,
        True,
    )
    assert permuted.tile_roofline_us > 10 * fused.tile_roofline_us


def test_tensor_cores_are_slow_to_fetch_rows_of_odd_length():
    def product(n):
        tensors = [
            {"role": "activation", "shape": shape, "dtype": "bfloat16"}
            for shape in ([4096, 768], [768, n])
        ]
        spec = {"kind": "aten", "tensors": tensors, "arguments": [{"tensor": 0}, {"tensor": 1}]}
        return describe(
            H200, "x", "mm", spec, 2 * 4096 * 768 * n, 2 * (4096 * 768 + 768 * n + 4096 * n)
        )

    assert product(50257).tile_roofline_us > 3 * product(50264).tile_roofline_us


def test_what_one_block_does_alone_bounds_a_call():
    def normed(channels, pixels):
        shapes = [[32, channels, pixels, pixels], *[[channels]] * 4]
        tensors = [{"role": "activation", "shape": shape, "dtype": "float32"} for shape in shapes]
        spec = {
            "kind": "aten",
            "tensors": tensors,
            "arguments": [{"tensor": place} for place in range(5)],
        }
        return describe(
            H200, "x", "cudnn_batch_norm", spec, 0, 8 * 32 * channels * pixels**2
        ).tile_roofline_us

    assert normed(16, 112) > 4 * normed(256, 28)

    def added(number):
        tensors = [{"role": "parameter", "shape": [65536], "dtype": "float32"}] * number
        spec = {
            "kind": "aten",
            "tensors": tensors,
            "arguments": [[{"tensor": place} for place in range(number)], 1],
        }
        return describe(H200, "x", "_foreach_add_", spec, 0, 8 * 65536 * number).tile_roofline_us

    assert added(111) > 1.5 * added(110)  # another launch, whose one block lets the others wait


def roofline_us(short_name, shapes, strides=None, *, bytes_moved, dtype="float32", flops=0, **spec):
    tensors = [
        {
            "role": "activation",
            "shape": shape,
            "dtype": dtype,
            **({"stride": stride} if stride else {}),
        }
        for shape, stride in zip(shapes, strides or [None] * len(shapes), strict=True)
    ]
    arguments = [{"tensor": place} for place in range(len(shapes))]
    return describe(
        H200,
        "x",
        short_name,
        {"tensors": tensors, "arguments": arguments, **spec},
        flops,
        bytes_moved,
    ).tile_roofline_us


IMAGE, LAST = [32, 96, 56, 56], [301056, 1, 5376, 96]  # channels last


def test_an_elementwise_operator_is_slower_only_where_its_tensors_do_not_lie_alike():
    size = 12 * 32 * 96 * 56 * 56
    contiguous = roofline_us("add", [IMAGE, IMAGE], bytes_moved=size)
    assert roofline_us("add", [IMAGE, IMAGE], [LAST, LAST], bytes_moved=size) == contiguous
    apart = roofline_us("add", [IMAGE, IMAGE], [LAST, None], bytes_moved=size)
    expanded = roofline_us("mul", [IMAGE, [96, 1, 1]], bytes_moved=size * 2 / 3, dtype="bfloat16")
    assert apart > 1.5 * expanded > 1.5 * contiguous / 3


def test_what_is_copied_into_order_value_by_value_takes_longest():
    size = 8 * 32 * 96 * 56 * 56
    kept, rows, values = (
        roofline_us(name, [IMAGE], [stride], bytes_moved=size)
        for name, stride in (
            ("clone", LAST),
            ("contiguous", [301056, 3136, 112, 1]),
            ("contiguous", LAST),
        )
    )
    assert kept < rows < values / 2


def test_a_layer_norm_of_short_rows_waits_for_each_and_orders_them_first():
    def normed(rows, width, stride=None):
        size = 8 * rows * width
        return roofline_us(
            "layer_norm",
            [[rows // 49, 49, width], [width], [width]],
            [stride, None, None],
            bytes_moved=size,
        )

    short, long = normed(49 * 2048, 96), normed(49 * 2048 // 8, 768)
    assert short > 3 * long
    assert normed(49 * 2048, 96, [96 * 49, 1, 49]) > short + 20


def test_a_convolution_of_one_channel_at_a_time_gains_nothing_from_tensor_cores():
    def depthwise(width, dtype):
        outputs = 32 * 96 * 56 * 56
        parameters = {
            "kernel_size": [width, width],
            "stride": [1, 1],
            "padding": [width // 2] * 2,
            "dilation": [1, 1],
        }
        parameters |= {"groups": 96, "in_channels": 96, "out_channels": 96}
        spec = {"kind": "module", "parameters": parameters}
        return roofline_us(
            "Conv2d",
            [IMAGE],
            bytes_moved=8 * outputs,
            dtype=dtype,
            flops=2 * outputs * width**2,
            **spec,
        )

    assert depthwise(3, "float32") < depthwise(7, "float32") < 4 * depthwise(3, "float32")
    assert depthwise(7, "bfloat16") > depthwise(7, "float32") / 3


def convolved(width, size, channels=64, bias=False, dtype="bfloat16", stride=1):
    """A Conv2d's tile roofline without its arithmetic, in us: of images of `size` x `size`
    pixels.
    """
    padding = [width // 2 if stride == 1 else 0] * 2
    parameters = {
        "kernel_size": [width, width],
        "stride": [stride, stride],
        "padding": padding,
        "dilation": [1, 1],
    }
    parameters |= {"groups": 1, "in_channels": channels, "out_channels": channels}
    shapes = [[32, channels, size, size], [channels, channels, width, width], *[[channels]] * bias]
    tensors = [{"role": "activation", "shape": shape, "dtype": dtype} for shape in shapes]
    spec = {
        "kind": "module",
        "parameters": parameters,
        "tensors": tensors,
        "arguments": [{"tensor": 0}],
    }
    call = describe(H200, "x", "Conv2d", spec, 10**6, 10**6)
    return call.tile_roofline_us - max(call.compute_us, call.traffic_us)


def test_half_precision_turns_images_channels_last_unless_each_is_one_product():
    assert convolved(3, 56) > convolved(3, 56, dtype="float32") + 10
    assert convolved(1, 56) == pytest.approx(convolved(1, 56, dtype="float32"))
    assert (
        convolved(1, 49) > convolved(1, 49, dtype="float32") + 10
    )  # an image does not fill whole loads
    assert convolved(1, 14) == pytest.approx(convolved(1, 14, dtype="float32"))
    assert convolved(1, 1) == pytest.approx(convolved(1, 1, dtype="float32"))
    assert (
        convolved(16, 64, stride=16) > convolved(16, 64, stride=16, dtype="float32") + 1
    )  # patches are no pixels


def test_the_bias_of_a_convolution_is_added_behind():
    assert convolved(1, 56, bias=True, dtype="float32") > convolved(1, 56, dtype="float32") + 10


def test_attention_of_other_than_four_dimensions_writes_its_scores_out_and_what_it_drops_is_known():
    def attention(shape, **keywords):
        spec = {"tensors": [{"role": "activation", "shape": shape, "dtype": "float32"}] * 3,
                "arguments": [{"tensor": 0}] * 3, "keywords": keywords}  # fmt: skip
        return describe(H200, "x", "scaled_dot_product_attention", spec, 10**9, 10**7)

    assert attention([16, 64, 4, 49, 32]).materialised
    assert not attention([1024, 4, 49, 32]).materialised
    assert attention([1024, 49, 32]).materialised
    assert attention([8, 4, 49, 32], dropout_p=0.1).drops
    assert not attention([8, 4, 49, 32], dropout_p=0.0).drops


def test_where_the_operators_of_a_step_are_told_what_to_drop():
    def drops(name, spec):
        return attention_options(name, spec)[2]

    heads = [{"tensor": 0}] * 4
    assert drops(
        "_scaled_dot_product_cudnn_attention", {"arguments": [*heads[:3], None, True, 0.1, False]}
    )
    assert drops("_scaled_dot_product_flash_attention", {"arguments": [*heads[:3], 0.1, True]})
    backward = [*heads, *heads[:2], None, None, 128, 128]
    assert drops(
        "_scaled_dot_product_flash_attention_backward", {"arguments": [*backward, 0.1, True]}
    )
    assert not drops(
        "_scaled_dot_product_flash_attention_backward", {"arguments": [*backward, 0.0, True]}
    )


def test_how_well_tiles_fill_the_card_is_told_for_each_size():
    products = Products(132 * 64, 64, 512)
    shares = tile_roofline(H200, KernelPlan("bfloat16", products.flops, 1), products).wave_shares
    assert shares == pytest.approx((1.0, 0.5, 0.25))
    coarse = tile_roofline(
        H200, KernelPlan("bfloat16", products.flops, 1, coarse=True), Products(16, 16, 4096)
    ).compute_us
    assert (
        coarse
        > tile_roofline(
            H200, KernelPlan("bfloat16", products.flops, 1), Products(16, 16, 4096)
        ).compute_us
    )


def test_a_pool_takes_as_long_as_its_windows_have_values():
    def pooled(window, step):
        spec = {
            "kind": "module",
            "parameters": {"kernel_size": window, "stride": step, "padding": 1},
        }
        return roofline_us(
            "MaxPool2d", [[32, 192, 28, 28]], bytes_moved=8 * 32 * 192 * 28**2, **spec
        )

    assert pooled(3, 1) > 3 * pooled(3, 2)
    assert pooled(5, {"tuple": [1, 1]}) > 2 * pooled({"tuple": [3, 3]}, 1)


def test_factors_of_a_product_are_folded_or_put_in_order_first():
    folded = products_of(
        "matmul",
        {
            "arguments": [{"tensor": 0}, {"tensor": 1}],
            "tensors": [
                {"shape": [4, 1, 4544], "dtype": "bfloat16"},
                {"shape": [4544, 4672], "dtype": "bfloat16"},
            ],
        },
    )
    assert folded == Products(4, 4672, 4544)

    def scores(stride):
        shapes = [[2048, 3, 49, 32], [2048, 3, 32, 49]]
        return roofline_us(
            "matmul", shapes, [stride, None], bytes_moved=136 * 10**6, flops=2 * 6144 * 49 * 49 * 32
        )

    assert scores([4704, 32, 96, 1]) > scores(None) + 20


def test_keys_that_fewer_heads_share_are_written_out_unless_the_attention_is_told():
    def decoding(**keywords):
        shapes = [[4, 71, 1, 64], [4, 1, 1024, 64], [4, 1, 1024, 64]]
        flops = 4 * 284 * 1024 * 64
        return roofline_us(
            "scaled_dot_product_attention",
            shapes,
            bytes_moved=10**6,
            dtype="bfloat16",
            flops=flops,
            keywords=keywords,
        )

    assert decoding() > 2 * decoding(enable_gqa=True)


def test_what_is_made_like_a_tensor_does_not_read_it():
    def bytes_of(name, *arguments, **keywords):
        spec = {"tensors": [{"role": "activation", "shape": [2048, 49, 96], "dtype": "bool"}],
                "arguments": [{"tensor": 0}, *arguments], "keywords": keywords}  # fmt: skip
        return describe(H200, "x", name, spec, 0, 2048 * 49 * 96).bytes_moved

    assert bytes_of("new_zeros", {"tuple": [56, 56]}) == bytes_of("new_zeros", 56, 56) == 56 * 56
    assert bytes_of("new_ones", size={"tuple": [56, 56]}, dtype={"dtype": "float32"}) == 4 * 56 * 56
    assert bytes_of("ones_like", dtype={"dtype": "int64"}) == 8 * 2048 * 49 * 96
    assert bytes_of("new_tensor", [0.5, 0.25]) == 2048 * 49 * 96


@pytest.mark.parametrize(
    ("name", "shapes", "arguments"),
    [
        ("layer_norm", [], []),
        ("roll", [[8, 8]], [{"tensor": 0}, 1, {"tuple": []}]),
        ("max_pool2d", [[1, 3, 8, 8]], [{"tensor": 0}, {"tensor": 0}]),
        ("max_pool2d", [[1, 3, 8, 8]], [{"tensor": 0}, [3], [0]]),
        ("adaptive_avg_pool2d", [[3, 8, 8]], [{"tensor": 0}, [None, 4]]),
        ("matmul", [[0, 4, 8], [8, 4]], [{"tensor": 0}, {"tensor": 1}]),
        ("matmul", [[8], [8]], [{"tensor": 0}, {"tensor": 1}]),
        (
            "scaled_dot_product_attention",
            [[4, 8], [4, 8], [4, 8]],
            [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}],
        ),
        ("add", [[], []], [{"tensor": 0}, {"tensor": 1}]),
        (
            "embedding_bag",
            [[10**6, 64], [8192], [512]],
            [{"tensor": 1}, {"tensor": 0}, {"tensor": 2}],
        ),
        ("conv1d", [[8, 64], [16, 8, 3]], [{"tensor": 0}, {"tensor": 1}]),
        ("conv2d", [[16], [8, 64]], []),
        (
            "convolution",
            [[4, 8, 6, 6], [8, 4, 2, 2], [4]],
            [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}, [2, 2], [0, 0], [1, 1], True, [0, 0], 1],
        ),
        ("cudnn_batch_norm", [[4, 0, 8, 8], [0]], [{"tensor": 0}, {"tensor": 1}]),
    ],
)
def test_what_is_called_in_unusual_ways_is_described_too(name, shapes, arguments):
    tensors = [{"role": "activation", "shape": shape, "dtype": "float32"} for shape in shapes]
    call = describe(H200, "x", name, {"tensors": tensors, "arguments": arguments}, 0, 10**6)
    assert call.tile_roofline_us < 40


def test_an_attention_of_one_tensor_with_itself_shares_no_keys():
    tensors = [
        {"role": "activation", "shape": shape, "dtype": "bfloat16"}
        for shape in ([8, 12, 512, 64], [1, 1, 512, 512])
    ]
    spec = {"tensors": tensors, "arguments": [*[{"tensor": 0}] * 3, {"tensor": 1}]}
    assert not describe(
        H200, "x", "scaled_dot_product_attention", spec, 6442450944, 31457280
    ).materialised


def test_single_channels_gain_nothing_from_tf32():
    parameters = {"kernel_size": [7, 7], "stride": [1, 1], "padding": [3, 3], "dilation": [1, 1]}
    parameters |= {"groups": 96, "in_channels": 96, "out_channels": 96}
    tensors = [{"role": "activation", "shape": IMAGE, "dtype": "float32"}]
    spec = {
        "kind": "module",
        "tensors": tensors,
        "arguments": [{"tensor": 0}],
        "parameters": parameters,
    }
    exact, rounded = (
        describe(H200, "x", "Conv2d", spec, 10**9, 10**7, tf32=tf32).tile_roofline_us
        for tf32 in (False, True)
    )
    assert rounded == exact


def test_few_rows_of_a_table_are_looked_up_one_after_the_other():
    def looked_up(rows):
        tensors = [{"role": "parameter", "shape": [50000, 2048], "dtype": "bfloat16"},
                   {"role": "activation", "shape": [rows], "dtype": "int64"}]  # fmt: skip
        spec = {"tensors": tensors, "arguments": [{"tensor": 1}]}
        return describe(H200, "x", "Embedding", spec, 0, 8192 * rows).tile_roofline_us

    assert looked_up(8) > 2 * looked_up(1)
    assert looked_up(8) > looked_up(64)


def test_a_backward_of_groups_is_not_counted_as_if_there_were_none():
    spec = {
        "kind": "aten",
        "arguments": [
            *({"tensor": 0}, {"tensor": 1}, {"tensor": 2}, None, [1, 1], [1, 1], [1, 1]),
            *(False, [0, 0], 64, [True, True, False]),
        ],
        "tensors": [
            *[{"role": "activation", "shape": [8, 64, 28, 28], "dtype": "float32"}] * 2,
            {"role": "parameter", "shape": [64, 1, 3, 3], "dtype": "float32"},
        ],
    }
    call = describe(H200, "x", "convolution_backward", spec, 10**12, 10**7)
    assert call.flops == 2 * 2 * 8 * 28 * 28 * 64 * 9
    assert (call.window, call.stride, call.products) == (9, 1, 128)


def backward_us(dtype, groups, window, mask=(True, True, False)):
    """The tile roofline of a convolution's backward: 8 images of 64 channels of 28 x 28 pixels."""
    spec = {
        "kind": "aten",
        "arguments": [
            *({"tensor": 0}, {"tensor": 1}, {"tensor": 2}, None, [1, 1], [window // 2] * 2, [1, 1]),
            *(False, [0, 0], groups, list(mask)),
        ],
        "tensors": [
            *[{"role": "activation", "shape": [8, 64, 28, 28], "dtype": dtype}] * 2,
            {"role": "parameter", "shape": [64, 64 // groups, window, window], "dtype": dtype},
        ],
    }
    moved = (4 if dtype == "float32" else 2) * 4 * 8 * 64 * 28 * 28
    return describe(H200, "x", "convolution_backward", spec, 10**9, moved).tile_roofline_us


def test_half_precision_does_not_make_the_backward_of_single_channels_faster():
    """The kernels wait for elements: readings of their forwards take as long in bfloat16."""
    assert backward_us("bfloat16", 64, 3) == pytest.approx(backward_us("float32", 64, 3), rel=0.01)


def test_half_precision_copies_images_for_each_gradient_of_a_convolution():
    both, of_weight = (True, True, False), (False, True, False)
    windows, pixels = backward_us("bfloat16", 1, 3, both), backward_us("bfloat16", 1, 1, both)
    assert windows > backward_us("bfloat16", 1, 3, of_weight)
    assert pixels == pytest.approx(backward_us("bfloat16", 1, 1, of_weight), rel=0.2)


def test_the_own_batch_norm_of_pytorch_is_not_faster_in_half_precision():
    def normalised_us(dtype, itemsize):
        tensors = [{"role": "activation", "shape": [32, 64, 56, 56], "dtype": dtype}]
        spec = {"kind": "aten", "arguments": [{"tensor": 0}], "tensors": tensors}
        moved = 2 * itemsize * 32 * 64 * 56 * 56
        return describe(H200, "x", "native_batch_norm", spec, 0, moved).tile_roofline_us

    assert normalised_us("bfloat16", 2) == pytest.approx(normalised_us("float32", 4))


def test_operators_of_one_work_share_a_type_and_a_family():
    products = ("Linear", "linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "einsum", "mv")
    assert {operator_type(name) for name in products} == {"linear"}
    assert {operator_family(name) for name in products} == {"product"}
    assert {operator_type(name) for name in ("ReLU", "relu_", "relu")} == {"relu"}
    assert operator_family("Conv2d") == "convolution" == operator_family("convolution")
    assert operator_family("convolution_backward") == "convolution backward"
    assert operator_family("gelu_backward") == "pointwise" == operator_family("no_such_operator")
    assert operator_family("_foreach_add_") == "optimizer"
    assert operator_type("Conv2d") == operator_type("conv2d") == operator_type("convolution")
    assert operator_family("native_layer_norm_backward") == "row norm backward"


def test_variants_of_an_architecture_are_one_family():
    for family, models in {
        "resnet": ("resnet18", "wide_resnet50_2", "resnext50_32x4d"),
        "vgg": ("vgg11_bn", "vgg16"),
        "llama": ("llama-3.1-8b", "mistral-7b", "llama_decode_32"),
        "bert": ("bert-base", "distilbert-base", "roberta-base"),
        "vit": ("vit_b_16", "deit_small_patch16_224"),
        "mobilenet": ("mobilenet_v2",),
        "mnasnet": ("mnasnet1_0",),
        "t5": ("t5-base",),
    }.items():
        assert {model_family(model) for model in models} == {family}


def test_counts_of_an_older_capture_do_not_hold_the_whole_table():
    spec = {
        "kind": "function",
        "arguments": [{"tensor": 0}, {"tensor": 1}],
        "tensors": [
            {"role": "activation", "shape": [8, 1], "dtype": "int64"},
            {"role": "parameter", "shape": [1000, 64], "dtype": "float32"},
        ],
    }
    call = describe(H200, "x", "embedding", spec, 0, 1000 * 64 * 4)
    assert call.bytes_moved == 8 * 2 * 64 * 4 + 8 * 8
    assert (call.rows, call.last_size) == (8, 64)

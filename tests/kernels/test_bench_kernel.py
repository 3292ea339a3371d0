"""The pure parts of the kernel benchmark: bytes, floors, means, flags, checks, candidates."""

# ruff: noqa: E402
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import kernel_figures as figures
import kernel_options
import kernel_sweep
from kernel_layers import compare
from kernel_peers import PlainWeights, unpack_words

F16 = figures.VARIANTS["f16"]
SMALL = figures.Shape("256x128", 256, 128)


def cell(m: int, shape: str = "l7b.o", variant: str = "f16") -> figures.Cell:
    return figures.Cell(figures.VARIANTS[variant], figures.SHAPES[shape], m)


def test_bytes_are_those_of_the_layout() -> None:
    sizes = figures.weight_bytes(figures.SHAPES["l7b.o"], F16)
    assert (sizes.codes, sizes.scales, sizes.zeros) == (8 << 20, 256 << 10, 0)
    with_zeros = figures.weight_bytes(figures.SHAPES["l7b.o"], figures.VARIANTS["zp"])
    assert with_zeros.zeros == 128 << 10
    fine = figures.weight_bytes(figures.SHAPES["l7b.o"], figures.VARIANTS["g32"])
    assert fine.scales == 1 << 20
    assert figures.moved_bytes(cell(16)) == sizes.total + 16 * (4096 + 4096) * 2


def test_copies_fill_the_memory_that_keeps_caches_cold() -> None:
    assert figures.copies_for(700 << 20) == 2
    assert figures.copies_for(1 << 20) == figures.MOST_COPIES
    for shape in figures.SHAPES.values():
        size = figures.weight_bytes(shape, F16).total
        assert figures.copies_for(size) * size >= figures.FILL_BYTES


@pytest.mark.parametrize(
    ("shape", "m", "us"),
    [
        *(("l7b.o", 1, 3.6), ("l7b.o", 64, 3.9), ("l8b.gateup", 64, 18.8), ("ideal", 1, 156.7)),
        *(("l70b.gateup", 32, 56.6), ("l70b.down", 4096, 2405.2), ("l7b.qkv", 96, 12.1)),
    ],
)
def test_the_reference_floor_gives_the_figures_that_targets_were_set_with(
    shape: str, m: int, us: float
) -> None:
    assert figures.reference_floor().us(cell(m, shape)) == pytest.approx(us, abs=0.06)


def test_beyond_the_last_size_the_floor_goes_on_straight() -> None:
    floor = figures.Floor(((0.0, 1.0), (10.0, 2.0), (20.0, 4.0)), peak_tflops=800)
    read = [floor.read_us(mib * figures.MIB) for mib in (0, 5, 10, 15, 20, 30)]
    assert read == [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    sizes = figures.floor_sizes([cell(1, "ideal", "8bit")])
    assert sizes[-2:] == [668, 1317]


def test_spreads_and_means() -> None:
    found = figures.summary([3.0, 1.0, 2.0, 5.0, 4.0])
    assert found == {"us": 3.0, "p10": 1.4, "p90": 4.6, "replays": 5}
    assert figures.geomean([0.5, 2.0]) == pytest.approx(1.0)
    assert figures.geomean([]) is None


def test_words_of_the_command_line() -> None:
    assert [s.name for s in figures.parse_shapes("l70b.*")] == [
        "l70b.o",
        "l70b.gateup",
        "l70b.down",
    ]
    assert figures.parse_shapes("4096x6144")[0] == figures.Shape("4096x6144", 4096, 6144)
    assert figures.parse_rows("extended") == list(figures.EXTENDED_ROWS)
    for parse, text in (
        (figures.parse_shapes, "l7b.o,l9b"),
        (figures.parse_shapes, "100x64"),
        (figures.parse_rows, "0,1"),
        (figures.parse_variants, "f17"),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            parse(text)
    options = kernel_options.parse(["--quick"])
    assert len(options.cells()) == 9
    assert len(kernel_options.parse([]).cells()) == 250
    with pytest.raises(SystemExit) as stopped:
        kernel_options.parse(["--plot", "picture.gif"])
    assert stopped.value.code == 2


def test_results_that_are_off_or_missing_are_wrong() -> None:
    places, expected = torch.arange(64), torch.randn((4, 64), dtype=torch.float64)
    y = expected.half()
    error, wrong = compare(cell(4), y, places, expected)
    assert not wrong
    assert 1e-5 < error < 3e-4
    assert compare(cell(4), y * 1.01, places, expected)[1].startswith("mean error")
    one_off = y.clone()
    one_off[2, 5] += 0.1
    assert compare(cell(4), one_off, places, expected)[1].startswith("one result is off by")
    one_off[2, 5] = float("nan")
    assert compare(cell(4), one_off, places, expected)[1].startswith("1 of 256 results")
    # Rounding to bfloat16 is right there, and wrong where float16 is asked for.
    rounded = expected.bfloat16()
    assert not compare(cell(4, variant="bf16"), rounded, places, expected)[1]
    assert compare(cell(4), rounded, places, expected)[1]


def test_plain_weights_of_a_peer_are_unpacked_lowest_bits_first() -> None:
    words = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack_words(words, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    negative = torch.tensor([[-1]], dtype=torch.int32)
    assert unpack_words(negative, 8).tolist() == [[255] * 4]
    plain = PlainWeights(SMALL, figures.VARIANTS["zp"], torch.device("cpu"))
    columns = plain.columns(torch.tensor([3, 100]))
    code, zero = (plain.weight[100, 200 // 8] >> 0) & 15, (plain.zeros[100 // 8, 1] >> 16) & 15
    assert columns[200, 1] == (int(code) - int(zero)) * plain.scales[100, 1].double()


def test_candidates_begin_with_the_plan_that_there_is() -> None:
    chosen = {"token_blocks": 2, "warps_n": 2, "warps_k": 8, "stages": 4, "ctas": 132}
    own = dict.fromkeys(kernel_sweep.FIELDS, 0) | chosen
    fed = own | {"copy_warp": 1, "tile_blocks": 8, "cluster": 2, "whole_tiles": 1, "stages": 7}
    found = kernel_sweep.candidates(own, cell(16), 132, [fed])
    assert found[0] == own
    assert len(found) == len({tuple(plan.values()) for plan in found})
    assert 500 < len(found) < 10_000
    assert {plan["token_blocks"] for plan in found} == {1, 2, 4}
    assert (64, 1) in {(plan["ctas"], plan["whole_tiles"]) for plan in found}
    assert {plan["stages"] for plan in found if plan["copy_warp"]} == {2, 3, 4, 6, 7}

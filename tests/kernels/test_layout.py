"""The layout header, its Python mirror and the hardware's fragment maps say the same."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from qlinear_service.kernels import build, layout

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def header_table(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    program = tmp_path_factory.mktemp("layout") / "layout_test"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fconstexpr-ops-limit=100000000"]
    source = ROOT / "tests" / "csrc" / "layout_test.cpp"
    command = ["g++", *flags, f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [line.split() for line in printed.splitlines()]


def test_the_python_mirror_equals_the_header(header_table: list[list[str]]) -> None:
    checked = {"version": 0, "align": 0, "bytes": 0, "code": 0, "scale": 0}
    for kind, *words in header_table:
        numbers = [int(word) for word in words]
        checked[kind] += 1
        if kind == "version":
            assert numbers == [layout.VERSION]
        elif kind == "align":
            assert numbers == [layout.ALIGN_BYTES]
        elif kind == "bytes":
            bits = numbers[0]
            assert numbers[1:] == [layout.tile_bytes(bits), layout.qweight_bytes(64, 128, bits)]
        elif kind == "code":
            bits, n, k, byte, shift = numbers
            assert layout.code_place(n, k, 256, bits) == (byte, shift)
        else:
            n, group, index = numbers
            assert layout.scale_index(group, n, 3) == index
    assert checked == {"version": 1, "align": 1, "bytes": 2, "code": 2 * 64 * 256, "scale": 64 * 3}


def test_the_build_compiles_every_source_there_is() -> None:
    found = [*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc/cpu").glob("*.cpp")]
    found += (ROOT / "csrc/cuda").glob("plan*.cpp")  # the planner, for `qlinear plan`
    on_disk = {str(path.relative_to(ROOT / "csrc")) for path in found}
    assert set(build.CPU_SOURCES) == on_disk


# The fragment maps of mma.m16n8k16, typed from the PTX ISA, not from our header.


def a_element(lane: int, i: int) -> tuple[int, int]:
    """Row and column of element i (0 .. 7) of the A operand (16 x 16) in a lane."""
    group, thread = lane >> 2, lane % 4
    row = group if i < 2 or 4 <= i < 6 else group + 8
    column = thread * 2 + (i & 1) + (0 if i < 4 else 8)
    return row, column


def b_element(lane: int, i: int) -> tuple[int, int]:
    """Row (k) and column (n) of element i (0 .. 3) of the B operand (16 x 8) in a lane."""
    group, thread = lane >> 2, lane % 4
    return thread * 2 + (i & 1) + (0 if i < 2 else 8), group


def dequantize_word(word: int) -> list[int]:
    """The 8 codes of a 4-bit word in the order in which lop3 masks hand them to the fragment."""
    registers = [(word >> shift) & 0x000F000F for shift in (0, 4, 8, 12)]
    return [half for register in registers for half in (register & 0xFFFF, register >> 16)]


def dequantize_words8(words: tuple[int, int]) -> list[int]:
    """The 8 codes of two 8-bit words, likewise."""
    registers = [(word >> shift) & 0x00FF00FF for word in words for shift in (0, 8)]
    return [half for register in registers for half in (register & 0xFFFF, register >> 16)]


def lane_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes [n, k] one by one through the layout; words [n / 16, k / 16, lane, 8 codes]."""
    n_size, k_size = codes.shape
    packed = np.zeros(layout.qweight_bytes(n_size, k_size, bits), np.uint8)
    for n in range(n_size):
        for k in range(k_size):
            byte, shift = layout.code_place(n, k, k_size, bits)
            packed[byte] |= codes[n, k] << shift
    words = packed.view("<u4").reshape(n_size // 16, k_size // 64, -1)
    decoded = np.zeros((n_size // 16, k_size // 16, 32, 8), np.int64)
    for block in np.ndindex(n_size // 16, k_size // 16):
        tile = words[block[0], block[1] // 4]
        inner = block[1] % 4
        for lane in range(32):
            if bits == 4:
                values = dequantize_word(int(tile[lane * 4 + inner]))
            else:
                at = (inner // 2 * 32 + lane) * 4 + inner % 2 * 2
                values = dequantize_words8((int(tile[at]), int(tile[at + 1])))
            decoded[(*block, lane)] = values
    return decoded


@pytest.mark.parametrize("bits", layout.BITS)
def test_words_are_fragments_of_the_a_operand(bits: int) -> None:
    codes = np.random.default_rng(1).integers(0, 2**bits, (64, 128)).astype(np.uint8)
    decoded = lane_words(codes, bits)
    for n_block, k_block, lane in np.ndindex(4, 8, 32):
        for i in range(8):
            row, column = a_element(lane, i)
            expected = codes[16 * n_block + row, 16 * k_block + column]
            assert decoded[n_block, k_block, lane, i] == expected


@pytest.mark.parametrize("bits", layout.BITS)
def test_both_halves_of_a_word_are_fragments_of_the_b_operand(bits: int) -> None:
    codes = np.random.default_rng(2).integers(0, 2**bits, (64, 128)).astype(np.uint8)
    decoded = lane_words(codes, bits)
    for n_block, k_block, lane in np.ndindex(4, 8, 32):
        for half in (0, 1):
            # Registers 0 and 2 belong to output features 0 .. 7, 1 and 3 to 8 .. 15.
            registers = decoded[n_block, k_block, lane].reshape(4, 2)[half::2].reshape(4)
            for i in range(4):
                k, n = b_element(lane, i)
                expected = codes[16 * n_block + 8 * half + n, 16 * k_block + k]
                assert registers[i] == expected


@pytest.mark.parametrize("bits", layout.BITS)
def test_four_blocks_are_the_register_operand_of_wgmma(bits: int) -> None:
    """wgmma.m64nNk16 with A in registers: warp w of the group holds rows 16 w .. 16 w + 15."""
    codes = np.random.default_rng(3).integers(0, 2**bits, (64, 64)).astype(np.uint8)
    x = np.random.default_rng(4).integers(-3, 4, (64, 8)).astype(np.int64)
    decoded = lane_words(codes, bits)
    y = np.zeros((64, 8), np.int64)
    for warp, k_step, lane in np.ndindex(4, 4, 32):
        for i in range(8):
            row, column = a_element(lane, i)
            y[16 * warp + row] += decoded[warp, k_step, lane, i] * x[16 * k_step + column]
    np.testing.assert_array_equal(y, codes.astype(np.int64) @ x)


def test_each_lane_owns_aligned_vectors_of_one_row_pair() -> None:
    """A 16-byte vector holds one lane's codes of four (4 bits) or two (8 bits) 16 x 16 blocks."""
    for bits, blocks in ((4, 4), (8, 2)):
        owners: dict[int, set[tuple[int, int]]] = {}
        for n in range(16):
            for k in range(64):
                vector = layout.code_place(n, k, 128, bits).byte // 16
                owners.setdefault(vector, set()).add((n % 8, k % 8 // 2))
        assert len(owners) == 128 // blocks
        assert all(len(lanes) == 1 for lanes in owners.values())


def test_a_lane_reads_its_pair_of_scales_at_once() -> None:
    for group in range(3):
        for n in range(8):
            first = layout.scale_index(group, n, 3)
            assert first % 2 == 0
            assert layout.scale_index(group, n + 8, 3) == first + 1

"""The instruction counter finds kernels, loops and classes in listings typed here."""

# ruff: noqa: E402
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import kernel_sass

LISTING = """
	code for sm_90a
		Function : _first
        /*0000*/                   LOP3.LUT R4, R5, 0xf000f, RZ, 0xc0, !PT ;     /* 0x1 */
                                                                                 /* 0x2 */
        /*0010*/                   HMMA.16816.F32 R8, R4, R6, R8 ;               /* 0x1 */
        /*0020*/              @!P0 BRA 0x10 ;                                    /* 0x1 */
        /*0030*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;       /* 0x1 */
        /*0040*/                   HMMA.16816.F32 R8, R4, R6, R8 ;               /* 0x1 */
        /*0050*/                   IMAD.WIDE R2, R3, 0x4, R2 ;                   /* 0x1 */
        /*0060*/                   HMMA.16816.F32 R8, R4, R6, R8 ;               /* 0x1 */
        /*0070*/                   LDS.128 R4, [R2] ;                            /* 0x1 */
        /*0080*/               @P1 BRA 0x30 ;                                    /* 0x1 */
        /*0090*/                   BRA 0x90 ;                                    /* 0x1 */
	code for sm_80
		Function : _second
        /*0000*/                   EXIT ;                                        /* 0x1 */
"""
RESOURCES = """
arch = sm_90a
 Function _first:
  REG:128 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:624 TEXTURE:0
arch = sm_80
 Function _second:
  REG:10 STACK:0 SHARED:0 LOCAL:0
"""


def test_the_loop_with_the_most_tensor_core_instructions_is_counted() -> None:
    first, second = kernel_sass.parse_code(LISTING)
    assert (first.mangled, first.arch, len(first.code)) == ("_first", "sm_90a", 10)
    first.name = "ns::linear<ns::F16, 4, 2, false>"
    shown = kernel_sass.figures(first, None)
    assert shown["loop"] == 6  # from 0x30 to 0x80; the last branch leads to itself
    assert shown["classes"] == {"mma": 2, "imad": 1, "move": 1, "lds": 1, "branch": 1}
    assert shown["weights_256"] == 1.0  # two mma for two blocks of rows
    assert (shown["per_256"], shown["span_per_256"]) == (6.0, 3.0)
    assert kernel_sass.figures(first, 1)["weights_256"] == 2.0
    assert kernel_sass.figures(second, None)["per_256"] is None


def test_resources_belong_to_an_architecture() -> None:
    found = kernel_sass.parse_resources(RESOURCES)
    assert found["sm_90a", "_first"]["REG"] == 128
    assert found["sm_90a", "_first"]["STACK"] == 8
    assert found["sm_80", "_second"]["REG"] == 10


def test_every_mnemonic_has_a_class() -> None:
    names = {
        "HGMMA": "mma",
        "UIADD3": "uniform",
        "ULDC": "const",
        "LDGDEPBAR": "wait",
        "X": "other",
    }
    assert {name: kernel_sass.class_of(name) for name in names} == names

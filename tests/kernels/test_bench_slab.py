"""The native producer of `bench slab`, on a library that pretends to be a GPU's."""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from dispatch_bench import DENSE, PLAIN, SECOND
from fake_cuda import HostKernels
from rich.console import Console
from slab_native import FeedResult, NativeFeed, measure_native
from slab_report import print_native
from slab_together import Group, compare_together, print_together
from slab_variant import STANDARD, Variant

from qlinear_service.cost import CostCurve, Steps
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels.cuda_abi import CudaBatch
from qlinear_service.kernels.torch_kernels import TorchKernels
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded


@pytest.fixture
def loaded(kernels: HostKernels) -> Iterator[Loaded]:
    kernels.library.fake_rows_reset()
    steps = tuple(Steps(rows, 0.0, cost, 0.0) for rows, cost in ((1, 1e-3), (8, 1e-3), (16, 2e-3)))
    yield Loaded(
        registry=LayerRegistry([PLAIN]),
        kernels=TorchKernels(),
        gpu=CudaStreams(kernels),
        curves={PLAIN.spec.shape: CostCurve(steps=steps)},
    )
    kernels.library.fake_rows_reset()


@pytest.fixture
def feed(loaded: Loaded, tmp_path: Path) -> Iterator[NativeFeed]:
    made = NativeFeed(loaded, tmp_path, most_slots=64)
    yield made
    made.close()


def counts(found: FeedResult) -> tuple[int, int]:
    return found.offered, found.answered + found.refused


def test_every_call_is_answered_or_refused_by_the_producer(feed: NativeFeed) -> None:
    slow = feed.run(rate=500, seconds=0.3)
    assert slow.answered == slow.offered > 80
    assert 1 <= slow.rows / slow.batches < 4
    assert 0 < slow.median <= slow.p99
    fast = feed.run(rate=5e6, seconds=0.2)
    offered, ended = counts(fast)
    assert offered == ended
    assert fast.refused > 0, "there are 64 slots"
    assert fast.rows == fast.answered
    assert fast.rows / fast.batches > slow.rows / slow.batches


def test_a_wrong_result_is_noticed(feed: NativeFeed) -> None:
    feed.run(rate=0, seconds=0.02)
    feed._x = feed._x * 2  # what is compared with; the rows that are sent stay
    with pytest.raises(RuntimeError, match="is wrong"):
        feed.run(rate=0, seconds=0.02)


def test_what_comes_back_is_an_error_of_the_benchmark(
    feed: NativeFeed,
    kernels: HostKernels,
) -> None:
    kernels.library.fake_fail(1)
    with pytest.raises(RuntimeError, match="1 calls came back: linear: pretended failure"):
        feed.run(rate=0, seconds=0.01)
    feed.run(rate=0, seconds=0.01)


def test_the_figures_stand_beside_their_targets(loaded: Loaded, capsys: object) -> None:
    found = measure_native(loaded, (0.01, 1.0, 2.0), 0.05, Variant(2))
    assert found["capacity_rows_per_second"] == 8000
    assert [row["load"] for row in found["loads"]] == [0.01, 1.0, 2.0]
    assert set(found["lone"]) == {"at once", "after 1 ms"}
    console = Console(width=250, record=True)
    print_native(console, "here", found)
    text = console.export_text()
    assert "within 20 %" in text
    assert "0.8 x capacity" in text
    assert "stages:spare 2:0: sweet spot 8 rows, capacity 8,000 rows/s" in text


def test_variants_are_read_as_they_are_shown(feed: NativeFeed) -> None:
    texts = ("3:0", "4:8", "3:16:urgent", "3:8:16", "3:8:0", "3:8:urgent:4", "3:4:two", "3:0:light")
    for text in (*texts, "3:0:lanes", "4:4:light:lanes", "3:4:two:light:lanes"):
        assert str(Variant.read(text)) == text
    assert Variant.read("5") == Variant(5)
    assert Variant.read("3:8:urgent:4") == Variant(3, 8, True, 4)
    assert Variant.read("3:8:4:two") == Variant(3, 8, False, 4, 2)
    assert Variant.read("3:light") == Variant(3, is_light=True)
    assert Variant.read("4:4:light:lanes") == Variant(4, 4, is_light=True, lanes=2)
    assert Variant.read(str(STANDARD)) == STANDARD
    for text in (
        "urgent",
        "3:lanes:light",
        "3:8:4:2",
        "3:8:urgent:urgent",
        "3:8:soon",
        "",
        "3:",
        "3:-1",
    ):
        with pytest.raises(ValueError, match="is no variant; expected STAGES"):
            Variant.read(text)


def test_products_leave_multiprocessors_alone_and_rows_may_go_first(
    loaded: Loaded, tmp_path: Path
) -> None:
    for blocks, row_blocks in ((None, 8), (3, 3), (0, 0)):
        made = NativeFeed(loaded, tmp_path, variant=Variant(2, 8, True, blocks), most_slots=8)
        made.run(rate=0, seconds=0.02)
        batch = CudaBatch()
        made._gpu.kernels.library.fake_last_batch(ctypes.byref(batch))
        assert batch.launch.plan[0].ctas == made._gpu.kernels.info.sm_count - 8
        assert batch.x.most_blocks == 0, "it was alone"
        assert made._direct.native._options.row_blocks == row_blocks
        assert [stream.priority for stream in made._gpu.in_order] == [-1, 0, -1]
        made.close()


@pytest.mark.parametrize(
    ("cores", "spinning", "spins"), [(False, 2, 0), (True, 1, 1), (True, 2, 2)]
)
def test_threads_spin_where_there_are_cores_enough(
    loaded: Loaded, tmp_path: Path, cores: bool, spinning: int, spins: int
) -> None:
    assert isinstance(loaded.gpu, CudaStreams)
    loaded.gpu.spins = cores
    made = NativeFeed(loaded, tmp_path, variant=Variant(2, spinning=spinning), most_slots=8)
    assert made._direct.native._options.spins == spins
    found = made.run(rate=0, seconds=0.02)
    assert found.answered == found.offered > 0
    made.close()


def test_a_variant_says_all_that_servers_may_do_otherwise(loaded: Loaded, tmp_path: Path) -> None:
    assert isinstance(loaded.gpu, CudaStreams)
    for text, each, copied, lanes in (
        ("3:4", 1, 0, 1),
        ("4:4:light", 8, 32 << 10, 1),
        ("4:4:light:lanes", 8, 32 << 10, 2),
    ):
        made = NativeFeed(loaded, tmp_path, variant=Variant.read(text), most_slots=8)
        options = made._direct.native._options
        assert options.stages_count == options.most_running == int(text[0])
        assert (options.timed_each, options.copied_row_bytes) == (each, copied)
        assert (options.second.stream is not None) == (lanes == 2)
        found = made.run(rate=0, seconds=0.02)
        assert found.answered == found.offered > 0
        made.close()


def test_layers_of_a_call_are_measured_both_ways(
    loaded: Loaded,
    kernels: HostKernels,
) -> None:
    assert isinstance(loaded.gpu, CudaStreams)
    before = int(kernels.library.fake_chains())
    found = compare_together(loaded.gpu, [PLAIN, SECOND], (1, 4))
    assert int(kernels.library.fake_chains()) - before == 2 * 220
    assert [row["rows"] for row in found] == [1, 4]
    for row in found:
        assert row["ratio"] == row["together_seconds"] / row["one_by_one_seconds"] > 0
        # The library says 9 us of each product, and of the chain.
        assert row["one_by_one_kernel_seconds"] == pytest.approx(2 * row["together_kernel_seconds"])
    console = Console(width=250, record=True)
    print_together(console, "a group", found)
    assert "as one / one by one" in console.export_text()
    with pytest.raises(RuntimeError, match="do not go together"):
        compare_together(loaded.gpu, [PLAIN, DENSE], (1,))


def test_groups_are_read_as_they_are_shown() -> None:
    assert Group.read("4096x4096,1024,1024") == Group(4096, (4096, 1024, 1024))
    assert str(Group.read("64x128,64")) == "64x128,64"
    for text in ("4096", "4096x4096", "x1,2", "4096x1,two", "4096x1,,2"):
        with pytest.raises(ValueError, match="is no group of layers; expected KxN,N"):
            Group.read(text)

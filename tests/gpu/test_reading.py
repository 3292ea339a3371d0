"""The read kernels: every variant reads, and what they measure is plausible."""

import torch
from gpu.loading import RecordingKernels
from gpu.problems import Problem
from gpu.running import check

from qlinear_service.kernels.cuda_abi import CudaLaunch

MEBIBYTE = 1 << 20


def test_every_variant_reads_all_of_it(kernels: RecordingKernels) -> None:
    """Twice the bytes take longer, well beyond what fits into any cache."""
    memory = torch.ones(64 * MEBIBYTE, dtype=torch.int64, device=kernels.device)
    sink = torch.zeros(64, dtype=torch.uint8, device=kernels.device)
    launch = CudaLaunch(device=kernels.device.index or 0)
    for variant in range(kernels.library.ql_cuda_read_variants()):
        times = []
        for nbytes in (0, 16, 4096 + 16, 256 * MEBIBYTE, 512 * MEBIBYTE):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for event in (start, stop):
                event.record()
            launch.stream = torch.cuda.current_stream(kernels.device).cuda_stream
            launch.start_event, launch.stop_event = start.cuda_event, stop.cuda_event
            for _ in range(2):  # the first one loads the kernel
                status = kernels.library.ql_cuda_read_probe(
                    memory.data_ptr(), nbytes, variant, sink.data_ptr(), launch
                )
                assert status == 0
            kernels.wait()
            times.append(start.elapsed_time(stop))
        assert times[-1] > 1.5 * times[-2] > 3 * times[1], (variant, times)


def test_floors_grow_with_size_and_are_no_wonder(kernels: RecordingKernels) -> None:
    memory = torch.ones(64 * MEBIBYTE, dtype=torch.int64, device=kernels.device)
    seconds = [kernels.read_seconds(memory, size * MEBIBYTE) for size in (1, 16, 128)]
    assert seconds == sorted(seconds)
    # Nothing of today reads 20 TB/s from memory; an idle or wrong kernel would seem to.
    assert seconds[-1] > 128 * MEBIBYTE / 20e12
    kernels.read(memory[: 4 * MEBIBYTE], passes=3, threads=1)


def test_reading_does_not_disturb_products(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 200, 4096)
    x = problem.x(9)
    exact = problem.product(x)
    memory = torch.ones(MEBIBYTE, dtype=torch.int64, device=kernels.device)
    for _ in range(5):
        kernels.read(memory, passes=2, threads=1)
        check(kernels, problem, x, exact)

"""Graphs, streams, threads, events and dependent launches: time and order change no bit."""

import threading

import torch
from gpu import loading
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem, assert_same
from gpu.running import rounded

from qlinear_service.dtypes import DType


def churn(device: torch.device, turn: int) -> None:
    """Take memory, fill it with NaN and give it back: what was freed too early is overwritten."""
    sizes = (64, 4096, 1 << 20, 33 << 20)
    blocks = [torch.empty(size, device=device).fill_(float("nan")) for size in sizes]
    del blocks[turn % len(blocks) :]


def chain(device: torch.device) -> list[Problem]:
    """Layers that follow one another: split tiles, whole tiles, a permuted one."""
    return [
        Problem(device, 520, 4096),
        Problem(device, 4096, 520, Form(permuted=True, group_size=32)),
        Problem(device, 96, 4096, Form(symmetric=False, bias=torch.float16)),
    ]


def small_x(problem: Problem, m: int) -> torch.Tensor:
    """Return activations that stay finite through the chain."""
    return (problem.x(m) / 4096).half()


def forward(kernels: RecordingKernels, layers: list[Problem], x: torch.Tensor) -> torch.Tensor:
    for problem in layers:
        x = kernels.linear(problem.layer, x, DType.F16)
    return x


def test_a_graph_replays_a_thousand_times(kernels: RecordingKernels) -> None:
    """Captured on a stream that has launched nothing before; inputs change between replays."""
    problem = chain(kernels.device)[0]
    for m in (1, 30):
        x = problem.x(m)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernels.linear(problem.layer, x, DType.F32)
        differing = torch.zeros((), dtype=torch.int64, device=kernels.device)
        for turn in range(1000):
            if turn % 100 == 0:
                x.copy_(problem.x(m))
                expected = rounded(problem.product(x), torch.float32)
            y.fill_(float("nan"))
            graph.replay()
            differing += (y != expected).any()
            churn(kernels.device, turn)
        assert differing.item() == 0


def test_a_graph_of_several_layers(kernels: RecordingKernels) -> None:
    layers = chain(kernels.device)
    x = small_x(layers[0], 9)
    expected = forward(kernels, layers, x)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward(kernels, layers, x)
    for turn in range(100):
        churn(kernels.device, turn)
        y.fill_(float("nan"))
        graph.replay()
        assert_same(y, expected)


def test_eager_launches_between_replays(kernels: RecordingKernels) -> None:
    layers = chain(kernels.device)
    x = layers[0].x(5)
    expected = kernels.linear(layers[0].layer, x, DType.F32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernels.linear(layers[0].layer, x, DType.F32)
    for _ in range(100):
        graph.replay()
        assert_same(kernels.linear(layers[0].layer, x, DType.F32), expected)
        assert_same(y, expected)


def test_two_streams_at_once(kernels: RecordingKernels) -> None:
    """Each with its own workspace; layers large enough that launches overlap."""
    problems = [Problem(kernels.device, 1000, 8192, seed=seed, exact=False) for seed in (0, 1)]
    xs = [problem.normal_x(12) for problem in problems]
    serial = [kernels.linear(p.layer, x, DType.F32) for p, x in zip(problems, xs, strict=True)]
    kernels.wait()
    streams = [torch.cuda.Stream(kernels.device) for _ in problems]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(300):
        for place, stream in enumerate(streams):
            results[place].append(
                kernels.linear(problems[place].layer, xs[place], DType.F32, stream=stream)
            )
    for stream in streams:
        kernels.wait(stream)
    for place, ys in enumerate(results):
        assert all(torch.equal(y, serial[place]) for y in ys)


def test_threads_with_streams_of_their_own(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 1000, 4096, exact=False)
    xs = [problem.normal_x(m) for m in (1, 9, 20, 70)]
    serial = [kernels.linear(problem.layer, x, DType.F32) for x in xs]
    kernels.wait()
    wrong: list[int] = []

    def work(place: int) -> None:
        stream = torch.cuda.Stream(kernels.device)
        ys = [kernels.linear(problem.layer, xs[place], DType.F32, stream=stream)
              for _ in range(200)]  # fmt: skip
        kernels.wait(stream)
        wrong.extend(place for y in ys if not torch.equal(y, serial[place]))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_work_is_done_on_the_stream_that_is_named(kernels: RecordingKernels) -> None:
    """A launch on a stream waits for what that stream did before, and for nothing else."""
    problem = Problem(kernels.device, 256, 1024)
    x = problem.x(4)
    expected = rounded(problem.product(x), torch.float32)
    stream = torch.cuda.Stream(kernels.device)
    for _ in range(20):
        late = torch.zeros_like(x)
        stream.wait_stream(torch.cuda.current_stream(kernels.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            late.copy_(x)
        y = kernels.linear(problem.layer, late, DType.F32, stream=stream)
        kernels.wait(stream)
        assert_same(y, expected)


def test_events_time_the_product(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 4096, 4096)
    x = problem.x(1)
    for _ in range(3):
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        y = kernels.linear(problem.layer, x, DType.F32, events=events)
        kernels.wait()
        milliseconds = events[0].elapsed_time(events[1])
    assert 0.001 < milliseconds < 1.0
    assert_same(y, rounded(problem.product(x), torch.float32))


def test_dependent_launches_wait_for_what_they_read(kernels: RecordingKernels) -> None:
    """Each layer reads what the one before it wrote, many times without a pause."""
    overlapping = loading.open_kernels(dependent=True)
    layers = chain(kernels.device)
    for m in (1, 9, 40):
        xs = [small_x(layers[0], m) for _ in range(50)]
        expected = [forward(kernels, layers, x) for x in xs]
        kernels.wait()
        for _ in range(4):
            ys = [forward(overlapping, layers, x) for x in xs]
            overlapping.wait()
            for y, right in zip(ys, expected, strict=True):
                assert_same(y, right)


def test_dependent_launches_in_a_graph(kernels: RecordingKernels) -> None:
    overlapping = loading.open_kernels(dependent=True)
    layers = chain(kernels.device)
    x = small_x(layers[0], 3)
    expected = forward(kernels, layers, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(10):
            y = forward(overlapping, layers, x)
    for _ in range(50):
        y.fill_(float("nan"))
        graph.replay()
        assert_same(y, expected)

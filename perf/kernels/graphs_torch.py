# SPDX-License-Identifier: Apache-2.0
"""Timing of functions as CUDA graphs, in turns: what the benchmarks beside torch share."""
import statistics

import torch


def capture(function):
    """The function as a graph; it has run before, on another stream, as torch wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def once(graph, times):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times * 1000


def measure(graphs, samples, sample_ms):
    """Microseconds: the median of each, and the tenth and ninetieth percentile."""
    times = {name: max(1, int(sample_ms * 1000 / max(once(graph, 3), 1))) for name, graph in graphs.items()}
    found = {name: [] for name in graphs}
    for _ in range(samples):
        for name, graph in graphs.items():
            found[name].append(once(graph, times[name]))
    out = {}
    for name, values in found.items():
        deciles = statistics.quantiles(values, n=10)
        out[name] = (statistics.median(values), deciles[0], deciles[-1])
    return out

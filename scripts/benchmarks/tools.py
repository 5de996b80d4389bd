"""What the benchmarks share: interleaved rounds and their medians."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from timeslice.embedded import EmbeddedServer

ROUNDS = 7


def free_port() -> int:
    """A loopback port nobody listens on: shared Redis is spoken to over TCP, so that is what is measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Figures:
    """Ratios (ours against a reference), and absolute values for the reader."""

    ratios: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    aims: dict[str, str] = field(default_factory=dict)


def tcp_url(server: EmbeddedServer) -> str:
    url = server.tcp_url
    assert url
    return url


def rounds(*measures: Callable[[], list[float]]) -> list[float]:
    """Run the measures in turn, ROUNDS times after one warm-up; the median of each round's median."""
    medians: list[list[float]] = [[] for _ in measures]
    for number in range(ROUNDS + 1):
        for place, measure in enumerate(measures):
            value = statistics.median(measure())
            if number:
                medians[place].append(value)
    return [statistics.median(values) for values in medians]


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of them lie."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]

"""NCCL's carrier where things go wrong: deadlines, aborts, and sides that learn of each other's end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from system.core.errors import ConfigError
from system.core.weights import nccl, nccl_library
from system.core.weights.lifeline import Lifeline
from system.core.weights.nccl import Communicator, NcclGroup
from system.core.weights.sender import Sender
from system.core.weights.wire import Endpoint, TransferBroken
from tests.system.memory_nccl import (
    FailingCommunicator,
    HangingAbortCommunicator,
    MemoryCommunicator,
    NeverReadyCommunicator,
    StuckCommunicator,
)

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
WAIT_S = 20.0
AT_ONCE_S = 5.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def connected(threads: ThreadPoolExecutor, sending: type[Communicator], receiving: type[Communicator]) -> Any:
    sender, receiver = NcclGroup(CPU, sending), NcclGroup(CPU, receiving)
    joining = threads.submit(receiver.join, sender.open(LOOPBACK), 1, 2, WAIT_S)
    sender.connect(2, WAIT_S)
    joining.result(WAIT_S)
    return sender, receiver


def flat() -> torch.Tensor:
    return torch.arange(64, dtype=torch.uint8)


def seconds_until_broken(group: NcclGroup, deadline_s: float, match: str) -> float:
    started_s = time.monotonic()
    with pytest.raises(TransferBroken, match=match):
        group.broadcast(flat(), deadline_s)
    return time.monotonic() - started_s


def test_bytes_that_never_come_are_an_error_at_the_deadline_and_the_communicator_is_aborted(
    threads: ThreadPoolExecutor,
) -> None:
    sender, receiver = connected(threads, StuckCommunicator, StuckCommunicator)
    communicator = receiver._communicator
    took_s = seconds_until_broken(receiver, 1.0, "rank 1 of 2: a bucket was not through within 1 s")
    assert 1.0 <= took_s < AT_ONCE_S
    assert communicator.aborted
    assert seconds_until_broken(sender, WAIT_S, "rank 1 left: a bucket was not through within 1 s") < AT_ONCE_S


def test_the_first_error_aborts_and_is_told_to_the_other_side(threads: ThreadPoolExecutor) -> None:
    sender, receiver = connected(threads, StuckCommunicator, FailingCommunicator)
    waiting = threads.submit(seconds_until_broken, sender, WAIT_S, "rank 0 of 2: rank 1 left: remote process exited")
    assert seconds_until_broken(receiver, WAIT_S, "remote process exited or there was a network error") < AT_ONCE_S
    assert waiting.result(WAIT_S) < AT_ONCE_S
    for group in (sender, receiver):
        with pytest.raises(TransferBroken, match="not connected"):
            group.broadcast(flat(), WAIT_S)


def test_one_receivers_error_reaches_all_others(threads: ThreadPoolExecutor) -> None:
    sender = NcclGroup(CPU, StuckCommunicator)
    receivers = [NcclGroup(CPU, StuckCommunicator), NcclGroup(CPU, StuckCommunicator)]
    endpoint = sender.open(LOOPBACK)
    joins = [threads.submit(group.join, endpoint, rank, 3, WAIT_S) for rank, group in enumerate(receivers, start=1)]
    sender.connect(3, WAIT_S)
    for join in joins:
        join.result(WAIT_S)
    waiting = [
        threads.submit(seconds_until_broken, group, WAIT_S, "left: (rank 1 left: )?it rejected them")
        for group in (sender, receivers[1])
    ]
    receivers[0].close("it rejected them")
    assert all(future.result(WAIT_S) < AT_ONCE_S for future in waiting)


def test_a_clean_up_that_hangs_does_not_keep_the_caller(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "ABORT_S", 0.2)
    _, receiver = connected(threads, StuckCommunicator, HangingAbortCommunicator)
    assert seconds_until_broken(receiver, 0.2, "not through within 0.2 s") < AT_ONCE_S


def test_ranks_that_nccl_does_not_connect_are_an_error_at_the_deadline_on_both_sides(
    threads: ThreadPoolExecutor,
) -> None:
    sender, receiver = NcclGroup(CPU, NeverReadyCommunicator), NcclGroup(CPU, NeverReadyCommunicator)
    joining = threads.submit(receiver.join, sender.open(LOOPBACK), 1, 2, 1.0)
    with pytest.raises(TransferBroken, match="did not connect all ranks"):
        sender.connect(2, 1.0)
    with pytest.raises(TransferBroken, match="did not connect all ranks"):
        joining.result(AT_ONCE_S)


def test_ranks_that_do_not_join_are_named() -> None:
    sender = NcclGroup(CPU, MemoryCommunicator)
    endpoint = sender.open(LOOPBACK)
    line = Lifeline()
    line.reach(endpoint, 2, WAIT_S)
    with pytest.raises(TransferBroken, match=r"not all joined within 1 s: ranks \[1, 3\] did not"):
        sender.connect(4, 1.0)
    with pytest.raises(TransferBroken, match=r"the sender left: not all joined within 1 s"):
        line.check()
    line.close("")


def test_strangers_and_ranks_that_are_there_already_are_turned_away(threads: ThreadPoolExecutor) -> None:
    lines = Lifeline()
    endpoint = lines.listen(LOOPBACK)
    place = (endpoint.address, endpoint.port)
    gathering = threads.submit(lines.gather, 3, WAIT_S)
    with socket.create_connection(place) as stranger, socket.create_connection(place):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        first, twin, second = Lifeline(), Lifeline(), Lifeline()
        first.reach(endpoint, 1, WAIT_S)
        twin.reach(endpoint, 1, WAIT_S)
        second.reach(endpoint, 2, WAIT_S)
        gathering.result(WAIT_S)
        lines.tell(b"hello", WAIT_S)
        assert [line.hear(5, WAIT_S) for line in (first, second)] == [b"hello", b"hello"]
        with pytest.raises(TransferBroken, match="the sender left before all had joined"):
            twin.hear(5, WAIT_S)
    for line in (lines, first, twin, second):
        line.close("")


def _send_nothing(endpoints: Any) -> None:
    group = NcclGroup(CPU, StuckCommunicator)
    endpoints.put(group.open(LOOPBACK))
    group.connect(2, WAIT_S)
    time.sleep(300)


@pytest.fixture
def foreign_sender() -> Iterator[tuple[Any, Endpoint]]:
    """A process that is the sender of a group of two, and sends nothing."""
    context = multiprocessing.get_context("spawn")
    endpoints = context.Queue()
    process = context.Process(target=_send_nothing, args=(endpoints,), daemon=True)
    process.start()
    yield process, endpoints.get(timeout=60)
    process.kill()
    process.join(10)


def test_a_sender_that_is_killed_is_an_error_at_once(foreign_sender: tuple[Any, Endpoint]) -> None:
    process, endpoint = foreign_sender
    group = NcclGroup(CPU, StuckCommunicator)
    group.join(endpoint, 1, 2, WAIT_S)
    killing = threading.Timer(0.5, process.kill)
    killing.start()
    assert seconds_until_broken(group, WAIT_S, "the sender left: its process ended") < AT_ONCE_S


@pytest.mark.parametrize("when", ["before it answers", "while it sends"])
def test_a_sender_that_is_stopped_is_an_error_at_the_deadline(foreign_sender: tuple[Any, Endpoint], when: str) -> None:
    process, endpoint = foreign_sender
    group = NcclGroup(CPU, StuckCommunicator)
    if when == "while it sends":
        group.join(endpoint, 1, 2, WAIT_S)
        os.kill(process.pid, signal.SIGSTOP)
        assert 1.0 <= seconds_until_broken(group, 1.0, "not through within 1 s") < AT_ONCE_S
    else:
        os.kill(process.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(TransferBroken, match="rank 1 of 2: not all joined"):
            group.join(endpoint, 1, 2, 1.0)
        assert 1.0 <= time.monotonic() - started_s < AT_ONCE_S


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_without_a_gpu_the_sender_says_so_at_once() -> None:
    with pytest.raises(ConfigError, match="nccl_checked sends weights from GPU to GPU, and this process has none"):
        Sender("nccl_checked")


def test_a_torch_without_nccl_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    nccl_library._library.cache_clear()
    monkeypatch.setattr(nccl_library.ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match=r"libnccl\.so\.2: cannot open .* install the CUDA build of torch"):
        nccl_library.NcclCommunicator.new_unique_id()

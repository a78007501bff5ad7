"""Whole transfers over the real carriers: gloo between threads and processes, the in-process one, and NCCL's.

Without GPUs, NCCL's carrier is under test with all of its own, over a stand-in for the NCCL library.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from system.core.weights import inline
from system.core.weights.gloo import GlooGroup
from system.core.weights.inline import InlineGroup
from system.core.weights.nccl import NcclGroup
from system.core.weights.sender import Sender, SenderBackend, manifest_of
from system.core.weights.wire import (
    ChecksumMismatch,
    Manifest,
    ParameterInfo,
    TransferBroken,
    WeightsRejected,
    new_buffer,
    pack,
    parameters_of,
    seal,
    unpack,
    verify,
)
from tests.system.memory_nccl import MemoryCommunicator

BACKENDS: list[SenderBackend] = ["gloo", "inline", "nccl_checked"]
Group = GlooGroup | InlineGroup | NcclGroup
WAIT_S = 20.0


class FixedSource:
    """Tensors that do not change."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def parameters(self) -> list[ParameterInfo]:
        return parameters_of(self.tensors.items(), "float32")

    def gather(self, names: list[str]) -> list[torch.Tensor]:
        return [self.tensors[name] for name in names]


def some_source() -> FixedSource:
    torch.manual_seed(0)
    return FixedSource({f"layer{i}.weight": torch.randn(5, 7) for i in range(9)})


def listener(backend: SenderBackend) -> Group:
    if backend == "nccl_checked":
        return NcclGroup(torch.device("cpu"), MemoryCommunicator)
    return GlooGroup() if backend == "gloo" else InlineGroup()


def sender_over(backend: SenderBackend) -> Sender:
    if backend != "nccl_checked":
        return Sender(backend)
    sender = Sender("gloo")
    sender._group = listener(backend)
    return sender


def receive(group: Group, manifest: Manifest, deadline_s: float = WAIT_S) -> dict[str, torch.Tensor]:
    arrived = {}
    for bucket in manifest.buckets():
        flat = new_buffer(bucket)
        group.broadcast(flat, deadline_s)
        verify(bucket, manifest.version, flat)
        arrived.update(zip(bucket.names, unpack(bucket, flat), strict=True))
    return arrived


class Threads:
    """Runs the other ends of a transfer."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8)

    def start(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(call, *arguments)


@pytest.fixture
def threads() -> Threads:
    return Threads()


def connected(backend: SenderBackend, threads: Threads, receivers: int = 1) -> tuple[Sender, list[Group]]:
    sender, groups = sender_over(backend), [listener(backend) for _ in range(receivers)]
    endpoint = sender.open()
    joins = [
        threads.start(group.join, endpoint, rank, receivers + 1, WAIT_S) for rank, group in enumerate(groups, start=1)
    ]
    sender.connect(receivers + 1, WAIT_S)
    for join in joins:
        join.result(WAIT_S)
    return sender, groups


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bucket_bytes", [1, 300, 1 << 20])
def test_every_receiver_gets_every_version_bit_for_bit(
    backend: SenderBackend, bucket_bytes: int, threads: Threads
) -> None:
    sender, groups = connected(backend, threads, receivers=2)
    for version in (1, 2):
        source = some_source()
        source.tensors = {name: tensor * version for name, tensor in source.tensors.items()}
        manifest = manifest_of(source, version, bucket_bytes)
        receiving = [threads.start(receive, group, manifest) for group in groups]
        report = sender.send(manifest, source, WAIT_S)
        assert (report.version, report.bytes, report.buckets) == (version, 9 * 35 * 4, len(manifest.buckets()))
        for arrived in (future.result(WAIT_S) for future in receiving):
            assert arrived.keys() == source.tensors.keys()
            assert all(torch.equal(arrived[name], source.tensors[name]) for name in arrived)
    sender.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_changed_on_the_way_are_a_checksum_mismatch(backend: SenderBackend, threads: Threads) -> None:
    groups = [listener(backend), listener(backend)]
    endpoint = groups[0].open("127.0.0.1")
    joining = threads.start(groups[1].join, endpoint, 1, 2, WAIT_S)
    groups[0].connect(2, WAIT_S)
    joining.result(WAIT_S)
    source = some_source()
    manifest = manifest_of(source, 1)
    bucket = manifest.buckets()[0]
    flat = new_buffer(bucket)
    pack(bucket, source.gather(bucket.names), flat)
    seal(bucket, 1, flat)
    flat[17] ^= 4
    receiving = threads.start(receive, groups[1], manifest)
    groups[0].broadcast(flat, WAIT_S)
    with pytest.raises(ChecksumMismatch, match=r"layer0\.weight"):
        receiving.result(WAIT_S)
    groups[0].close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receiver_that_never_joins_is_an_error_at_the_deadline(backend: SenderBackend) -> None:
    sender = sender_over(backend)
    sender.open()
    started_s = time.monotonic()
    with pytest.raises(TransferBroken, match="not all joined"):
        sender.connect(2, 1.0)
    assert time.monotonic() - started_s < 6.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sender_that_is_not_there_is_an_error_that_names_its_address(backend: SenderBackend) -> None:
    sender = sender_over(backend)
    endpoint = sender.open()
    sender.close()
    with pytest.raises(TransferBroken, match=f"no sender at {endpoint.address}:{endpoint.port}"):
        listener(backend).join(endpoint, 1, 2, 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stalled_sender_is_an_error_at_the_receivers_deadline(backend: SenderBackend, threads: Threads) -> None:
    sender, groups = connected(backend, threads)
    started_s = time.monotonic()
    with pytest.raises(TransferBroken):
        receive(groups[0], manifest_of(some_source(), 1), deadline_s=1.0)
    assert time.monotonic() - started_s < 3.0
    sender.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sender_that_fails_wakes_the_receivers_at_once(backend: SenderBackend, threads: Threads) -> None:
    sender, groups = connected(backend, threads, receivers=2)
    source = some_source()
    manifest = manifest_of(source, 1, 300)
    source.tensors["layer7.weight"] = torch.zeros(3)
    receiving = [threads.start(receive, group, manifest) for group in groups]
    started_s = time.monotonic()
    with pytest.raises(WeightsRejected, match=r"layer7\.weight"):
        sender.send(manifest, source, WAIT_S)
    for future in receiving:
        with pytest.raises(TransferBroken):
            future.result(WAIT_S)
    assert time.monotonic() - started_s < 5.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receiver_that_leaves_fails_the_sender_and_the_others(backend: SenderBackend, threads: Threads) -> None:
    sender, groups = connected(backend, threads, receivers=2)
    source = some_source()
    manifest = manifest_of(source, 1, 1)
    receiving = threads.start(receive, groups[0], manifest)
    groups[1].close()
    with pytest.raises(TransferBroken):
        sender.send(manifest, source, WAIT_S)
    with pytest.raises(TransferBroken):
        receiving.result(WAIT_S)


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_failure_a_new_group_carries_everything_again(backend: SenderBackend, threads: Threads) -> None:
    sender, groups = connected(backend, threads)
    groups[0].close()
    source = some_source()
    manifest = manifest_of(source, 3, 300)
    with pytest.raises(TransferBroken):
        sender.send(manifest, source, WAIT_S)
    endpoint = sender.open()
    joining = threads.start(groups[0].join, endpoint, 1, 2, WAIT_S)
    sender.connect(2, WAIT_S)
    joining.result(WAIT_S)
    receiving = threads.start(receive, groups[0], manifest)
    sender.send(manifest, source, WAIT_S)
    assert receiving.result(WAIT_S).keys() == source.tensors.keys()
    sender.close()


def _send_one_bucket_then_die(endpoints: Any) -> None:
    group = GlooGroup()
    endpoints.put(group.open("127.0.0.1"))
    group.connect(2, WAIT_S)
    source = some_source()
    manifest = manifest_of(source, 1, 300)
    bucket = manifest.buckets()[0]
    flat = new_buffer(bucket)
    pack(bucket, source.gather(bucket.names), flat)
    seal(bucket, 1, flat)
    group.broadcast(flat, WAIT_S)
    os._exit(9)


def test_a_sender_killed_between_two_buckets_is_an_error_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    endpoints = context.Queue()
    process = context.Process(target=_send_one_bucket_then_die, args=(endpoints,))
    process.start()
    group = GlooGroup()
    group.join(endpoints.get(timeout=60), 1, 2, WAIT_S)
    started_s = time.monotonic()
    with pytest.raises(TransferBroken):
        receive(group, manifest_of(some_source(), 1, 300))
    assert time.monotonic() - started_s < 5.0
    process.join(10)


def test_the_sender_listens_only_on_the_address_it_was_given() -> None:
    sender = Sender("gloo", "127.0.0.1")
    endpoint = sender.open()
    with open("/proc/net/tcp", encoding="ascii") as table:
        local = [line.split()[1] for line in table if line.split()[3] == "0A"]
    places = {place.split(":")[0] for place in local if int(place.split(":")[1], 16) == endpoint.port}
    assert places == {"0100007F"}
    sender.close()


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(TransferBroken, match=r"cannot listen on 192\.0\.2\.7"):
        Sender("gloo", "192.0.2.7").open()


def test_nothing_of_an_in_process_group_stays_behind(threads: Threads) -> None:
    before = len(inline._meetings)
    for _ in range(20):
        sender, groups = connected("inline", threads)
        source = some_source()
        manifest = manifest_of(source, 1)
        receiving = threads.start(receive, groups[0], manifest)
        sender.send(manifest, source, WAIT_S)
        receiving.result(WAIT_S)
        sender.close()
    assert len(inline._meetings) == before

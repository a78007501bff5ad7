"""NCCL's carrier over the real library: one GPU for the library itself, two for a transfer between processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from system.core.weights.nccl import NcclGroup, own_gpu
from system.core.weights.nccl_library import NcclCommunicator
from system.core.weights.sender import Sender, manifest_of
from system.core.weights.wire import Endpoint, ParameterInfo, TransferBroken, new_buffer, parameters_of, unpack, verify

WAIT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank; fewer than two")


class Source:
    """The same weights wherever they are made."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            f"layer{index}.weight": torch.randn(257, 129, generator=generator).to(device) for index in range(20)
        }

    def parameters(self) -> list[ParameterInfo]:
        return parameters_of(self.tensors.items(), "bfloat16")

    def gather(self, names: list[str]) -> list[torch.Tensor]:
        return [self.tensors[name] for name in names]


def until(ready: Any) -> None:
    end_s = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_a_communicator_of_one_rank_meets_sends_and_aborts() -> None:
    device = own_gpu()
    communicator = NcclCommunicator(NcclCommunicator.new_unique_id(), 0, 1, device)
    until(communicator.is_ready)
    flat = torch.arange(64, dtype=torch.uint8, device=device)
    communicator.start_broadcast(flat, 0)
    until(communicator.is_done)
    assert flat.tolist() == list(range(64))
    communicator.abort()


def _receive(endpoint: Endpoint, versions: int, answers: Any) -> None:
    torch.cuda.set_device(1)
    group = NcclGroup(own_gpu())
    try:
        group.join(endpoint, 1, 2, WAIT_S)
        source = Source("cpu")
        for version in range(1, versions + 1):
            manifest = manifest_of(source, version, 200_000)
            for bucket in manifest.buckets():
                flat = new_buffer(bucket, group.device, zeroed=False)
                group.broadcast(flat, WAIT_S)
                verify(bucket, version, flat)
                for name, tensor in zip(bucket.names, unpack(bucket, flat), strict=True):
                    assert torch.equal(tensor.cpu(), source.tensors[name].to(torch.bfloat16))
        answers.put("all arrived")
        group.broadcast(flat, WAIT_S)
    except TransferBroken as failure:
        answers.put(str(failure))


def joined_sender(versions: int) -> tuple[Sender, Any, Any]:
    torch.cuda.set_device(0)
    sender, answers = Sender("nccl_checked"), SPAWN.Queue()
    process = SPAWN.Process(target=_receive, args=(sender.open(), versions, answers), daemon=True)
    process.start()
    sender.connect(2, WAIT_S)
    return sender, process, answers


def send_versions(sender: Sender, source: Source, versions: Iterable[int]) -> None:
    for version in versions:
        sender.send(manifest_of(source, version, 200_000), source, WAIT_S)


@two_gpus
def test_weights_arrive_bit_for_bit_on_another_gpu_and_a_sender_that_leaves_is_noticed_at_once() -> None:
    sender, process, answers = joined_sender(versions=2)
    source = Source("cuda:0")
    send_versions(sender, source, (1, 2))
    assert answers.get(timeout=WAIT_S) == "all arrived"
    started_s = time.monotonic()
    sender.close()
    assert "the sender left" in answers.get(timeout=WAIT_S)
    assert time.monotonic() - started_s < 10.0
    process.join(WAIT_S)


@two_gpus
def test_a_receiver_that_is_killed_is_noticed_at_once_and_a_new_group_carries_everything() -> None:
    sender, process, _ = joined_sender(versions=100)
    source = Source("cuda:0")
    send_versions(sender, source, [1])
    process.kill()
    started_s = time.monotonic()
    with pytest.raises(TransferBroken):
        send_versions(sender, source, range(2, 10))
    assert time.monotonic() - started_s < 15.0
    sender, process, answers = joined_sender(versions=1)
    send_versions(sender, source, [1])
    assert answers.get(timeout=WAIT_S) == "all arrived"
    sender.close()
    process.join(WAIT_S)


@two_gpus
def test_ranks_that_never_join_are_an_error_at_the_deadline() -> None:
    sender = Sender("nccl_checked")
    sender.open()
    with pytest.raises(TransferBroken, match="not all joined within 2 s"):
        sender.connect(2, 2.0)

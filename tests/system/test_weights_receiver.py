"""Our receiving engines against the installed vLLM: what they are to it, and their one bucket loop."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from system.core.weights.nccl import NcclGroup
from system.core.weights.register import register
from system.core.weights.sender import Sender, manifest_of
from system.core.weights.wire import Manifest, ParameterInfo, Report, parameters_of
from tests.system.memory_nccl import MemoryCommunicator

pytestmark = pytest.mark.engine

WAIT_S = 20.0
CPU = torch.device("cpu")
NAMES = {"gloo": "Gloo", "nccl_checked": "NcclChecked", "inline": "Inline"}


@pytest.fixture(scope="module")
def receiver() -> Any:
    from system.core.weights import receiver

    return receiver


@pytest.mark.parametrize("backend", NAMES)
def test_vllm_finds_our_engine_under_the_backends_name(receiver: Any, backend: str) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    engine_class = WeightTransferEngineFactory._registry[WeightTransferConfig(backend=backend).backend]()
    assert engine_class is getattr(receiver, f"{NAMES[backend]}WeightTransferEngine")
    assert not inspect.isabstract(engine_class)


def test_the_checked_nccl_engine_is_vllms_nccl_engine_with_nothing_of_its_transfer_left(receiver: Any) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    checked, ours = receiver.NcclCheckedWeightTransferEngine, receiver.CheckedWeightTransferEngine
    assert issubclass(checked, NCCLWeightTransferEngine)
    assert issubclass(checked, ours)
    for name in WeightTransferEngine.__abstractmethods__ | {"update_weights", "init_info_cls", "update_info_cls"}:
        assert getattr(checked, name) is getattr(ours, name)


def test_every_call_that_vllm_makes_takes_what_vllm_hands_it(receiver: Any) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    for name in ("__init__", "update_weights", *WeightTransferEngine.__abstractmethods__):
        ours = inspect.signature(getattr(receiver.CheckedWeightTransferEngine, name))
        for base in (WeightTransferEngine, NCCLWeightTransferEngine):
            assert list(ours.parameters) == list(inspect.signature(getattr(base, name)).parameters)


def test_vllms_worker_keeps_the_engine_where_our_reports_are_asked_for() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert "self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(" in inspect.getsource(Worker)


class LoadedModel(torch.nn.Module):
    """Keeps what it is given to load."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.loaded: dict[str, torch.Tensor] = {}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter([(name, torch.nn.Parameter(torch.zeros(1))) for name in self.names])

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name not in self.names:
                raise KeyError(name)
            self.loaded[name] = tensor.clone()
        return {name for name, _ in weights}


class Source:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tensors = {f"layer{index}.weight": torch.randn(5, 7) for index in range(9)}

    def parameters(self) -> list[ParameterInfo]:
        return parameters_of(self.tensors.items(), "float32")

    def gather(self, names: list[str]) -> list[torch.Tensor]:
        return [self.tensors[name] for name in names]


class Transfer:
    """A checked NCCL engine over a model that only keeps its weights, joined to a sender."""

    def __init__(self, receiver: Any, names: list[str]) -> None:
        self.model = LoadedModel(names)
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(quantization=None))
        self.engine = receiver.NcclCheckedWeightTransferEngine(SimpleNamespace(), config, CPU, self.model)
        self.engine._group = NcclGroup(CPU, MemoryCommunicator)
        self.sender = Sender()
        self.sender._group = NcclGroup(CPU, MemoryCommunicator)
        self.threads = ThreadPoolExecutor(1)

    def join(self) -> None:
        endpoint = self.sender.open()
        info = {
            "address": endpoint.address, "port": endpoint.port, "rank_offset": 1, "world_size": 2, "deadline_s": WAIT_S
        }  # fmt: skip
        joining = self.threads.submit(self.engine.init_transfer_engine, self.engine.parse_init_info(info))
        self.sender.connect(2, WAIT_S)
        joining.result(WAIT_S)

    def receive(self, manifest: Manifest, deadline_s: float = WAIT_S) -> Report:
        self.engine.update_weights({"manifest": manifest.to_dict(), "deadline_s": deadline_s})
        return Report(*self.engine())


@pytest.fixture
def transfer(receiver: Any) -> Iterator[Transfer]:
    made = Transfer(receiver, list(Source().tensors))
    made.join()
    yield made
    made.sender.close()
    made.engine.shutdown()


def test_the_bucket_loop_loads_what_was_sent_bit_for_bit(transfer: Transfer) -> None:
    source = Source()
    manifest = manifest_of(source, 1, 300)
    sending = transfer.threads.submit(transfer.sender.send, manifest, source, WAIT_S)
    assert transfer.receive(manifest) == Report(False)
    assert sending.result(WAIT_S).buckets == len(manifest.buckets()) > 1
    assert transfer.model.loaded.keys() == source.tensors.keys()
    assert all(torch.equal(transfer.model.loaded[name], tensor) for name, tensor in source.tensors.items())


def test_a_name_that_the_model_lacks_is_reported_and_ends_the_senders_wait(transfer: Transfer) -> None:
    source = Source()
    source.tensors["layer9.weight"] = torch.zeros(5, 7)
    manifest = manifest_of(source, 1, 300)
    sending = transfer.threads.submit(transfer.sender.send, manifest, source, WAIT_S)
    report = transfer.receive(manifest)
    assert (report.failed, report.tag) == (True, "weights rejected")
    assert "layer9.weight" in report.text
    sending.exception(WAIT_S)
    with pytest.raises(Exception, match=r"left|not connected"):
        transfer.sender.send(manifest, source, WAIT_S)


def test_a_sender_that_goes_is_a_broken_transfer_at_once(transfer: Transfer) -> None:
    closing = threading.Timer(0.5, transfer.sender.close)
    closing.start()
    report = transfer.receive(manifest_of(Source(), 1, 300))
    assert (report.failed, report.tag) == (True, "transfer broken")
    assert "the sender left: it closed its end" in report.text


def test_an_update_that_vllm_cannot_read_is_a_failed_sync_of_no_kind(transfer: Transfer) -> None:
    transfer.engine.update_weights({"names": []})
    report = Report(*transfer.engine())
    assert (report.failed, report.tag) == (True, "")
    assert "Invalid update_info" in report.text

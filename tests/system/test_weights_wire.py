"""The wire of a weight sync: bucket plan, packing, seals and checksums."""

from __future__ import annotations

import json
import math
from dataclasses import astuple
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from system.core.errors import SyncFailed
from system.core.weights.wire import (
    WIRE_DTYPES,
    ChecksumMismatch,
    Manifest,
    ParameterInfo,
    Report,
    TransferBroken,
    WeightsRejected,
    checksum,
    new_buffer,
    pack,
    seal,
    unpack,
    verify,
)

shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
parameter_lists = st.lists(st.tuples(st.sampled_from(sorted(WIRE_DTYPES)), shapes), min_size=1, max_size=12).map(
    lambda entries: tuple(ParameterInfo(f"layer{i}.weight", *entry) for i, entry in enumerate(entries))
)
manifests = st.builds(Manifest, st.integers(0, 2**40), parameter_lists, st.integers(1, 4096))


def tensors_of(manifest: Manifest) -> dict[str, torch.Tensor]:
    torch.manual_seed(len(manifest.parameters))
    return {info.name: torch.randn(info.shape).to(info.torch_dtype) for info in manifest.parameters}


@settings(deadline=None)
@given(manifests)
def test_every_parameter_is_in_one_bucket_in_order_and_none_overlap(manifest: Manifest) -> None:
    buckets = manifest.buckets()
    assert [info for bucket in buckets for info in bucket.parameters] == list(manifest.parameters)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        ends = [offset + info.size_bytes for offset, info in zip(bucket.offsets, bucket.parameters, strict=True)]
        assert all(offset % 16 == 0 for offset in bucket.offsets)
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False))
        assert ends[-1] <= bucket.payload_bytes


@settings(deadline=None)
@given(manifests)
def test_a_bucket_exceeds_its_size_only_for_a_single_larger_tensor(manifest: Manifest) -> None:
    buckets = manifest.buckets()
    for bucket in buckets:
        assert bucket.payload_bytes <= manifest.bucket_bytes or len(bucket.parameters) == 1
    for bucket, following in pairwise(buckets):
        first_bytes = 16 * math.ceil(following.parameters[0].size_bytes / 16)
        assert bucket.payload_bytes + first_bytes > manifest.bucket_bytes


@settings(deadline=None)
@given(manifests)
def test_both_sides_compute_the_same_plan_from_the_plain_manifest(manifest: Manifest) -> None:
    received = Manifest.from_dict(manifest.to_dict())
    assert received == manifest
    assert received.buckets() == manifest.buckets()


@settings(deadline=None)
@given(manifests)
def test_what_is_packed_and_sealed_comes_out_bit_for_bit(manifest: Manifest) -> None:
    tensors = tensors_of(manifest)
    for bucket in manifest.buckets():
        flat = new_buffer(bucket)
        pack(bucket, [tensors[name] for name in bucket.names], flat)
        seal(bucket, manifest.version, flat)
        arrived = flat.clone()
        verify(bucket, manifest.version, arrived)
        for name, tensor in zip(bucket.names, unpack(bucket, arrived), strict=True):
            assert torch.equal(tensor, tensors[name])
            assert tensor.dtype == tensors[name].dtype


@settings(deadline=None)
@given(manifests, st.data())
def test_one_flipped_bit_anywhere_in_the_payload_is_a_mismatch_that_names_the_parameters(
    manifest: Manifest, data: st.DataObject
) -> None:
    bucket = data.draw(st.sampled_from(manifest.buckets()))
    tensors = tensors_of(manifest)
    flat = new_buffer(bucket)
    pack(bucket, [tensors[name] for name in bucket.names], flat)
    seal(bucket, manifest.version, flat)
    flat[data.draw(st.integers(0, bucket.payload_bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ChecksumMismatch, match=bucket.names[0]):
        verify(bucket, manifest.version, flat)


def slow_checksum(payload: bytes) -> int:
    """The formula of ``checksum``, word by word in Python integers."""
    mask, block = (1 << 64) - 1, 1 << 18

    def signed_shift(value: int, by: int) -> int:
        return ((value - (1 << 64) if value >> 63 else value) >> by) & mask

    def multiplier(position: int) -> int:
        mixed = (position + 1) * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ signed_shift(mixed, 29)) * 0x2545F4914F6CDD1D & mask
        return (mixed ^ signed_shift(mixed, 32)) | 1

    words = [int.from_bytes(payload[i : i + 8], "little") for i in range(0, len(payload), 8)]
    total = len(words)
    for start in range(0, len(words), block):
        held = words[start : start + block]
        total = (total * 0x9E3779B97F4A7C15 + sum(multiplier(i) * word for i, word in enumerate(held))) & mask
    return total - (1 << 64) if total >> 63 else total


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_the_checksum_is_its_formula_written_out(words: list[int]) -> None:
    payload = b"".join(word.to_bytes(8, "little") for word in words)
    assert checksum(torch.frombuffer(bytearray(payload or bytes(8)), dtype=torch.uint8)) == slow_checksum(
        payload or bytes(8)
    )


def test_the_checksum_is_its_formula_over_more_than_one_block() -> None:
    flat = torch.randint(0, 256, (8 * (2**18 + 5),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert checksum(flat) == slow_checksum(flat.numpy().tobytes())


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=64, max_size=64), st.integers(0, 15), st.integers(0, 15))
def test_the_checksum_knows_the_order_of_rows(values: list[int], one: int, other: int) -> None:
    rows = torch.tensor(values, dtype=torch.int32).view(16, 4)
    swapped = rows.clone()
    swapped[[one, other]] = rows[[other, one]]
    same = torch.equal(rows, swapped)
    assert (checksum(rows.flatten().view(torch.uint8)) == checksum(swapped.flatten().view(torch.uint8))) == same


def test_a_bucket_of_another_version_or_index_means_the_sides_are_out_of_step() -> None:
    manifest = Manifest(4, (ParameterInfo("a", "float32", (4,)), ParameterInfo("b", "float32", (4,))), 16)
    first, second = manifest.buckets()
    flat = new_buffer(first)
    pack(first, [torch.ones(4)], flat)
    seal(first, 4, flat)
    with pytest.raises(TransferBroken, match="expected bucket 1 of version 4, got bucket 0 of version 4"):
        verify(second, 4, flat)
    with pytest.raises(TransferBroken, match="expected bucket 0 of version 5"):
        verify(first, 5, flat)


def test_weights_are_cast_to_the_dtype_of_the_wire() -> None:
    manifest = Manifest(1, (ParameterInfo("a", "bfloat16", (3,)),))
    bucket = manifest.buckets()[0]
    flat = new_buffer(bucket)
    pack(bucket, [torch.tensor([1.0, 1.0 / 3.0, -7.0])], flat)
    assert torch.equal(unpack(bucket, flat)[0], torch.tensor([1.0, 1.0 / 3.0, -7.0], dtype=torch.bfloat16))


def test_a_source_that_gives_another_shape_is_rejected_by_name() -> None:
    bucket = Manifest(1, (ParameterInfo("layer.weight", "float32", (2, 3)),)).buckets()[0]
    with pytest.raises(WeightsRejected, match=r"layer\.weight: the source gave shape \(3, 2\)"):
        pack(bucket, [torch.zeros(3, 2)], new_buffer(bucket))
    with pytest.raises(WeightsRejected, match="2 tensors for 1 parameters"):
        pack(bucket, [torch.zeros(2, 3)] * 2, new_buffer(bucket))


def test_a_manifest_refuses_what_cannot_cross() -> None:
    with pytest.raises(ValueError, match="int8"):
        ParameterInfo("a", "int8", (1,))
    with pytest.raises(ValueError, match="named twice"):
        Manifest(1, (ParameterInfo("a", "float32", (1,)),) * 2)
    with pytest.raises(ValueError, match="bucket_bytes"):
        Manifest(1, (), 0)


@pytest.mark.parametrize("kind", [TransferBroken, ChecksumMismatch, WeightsRejected, SyncFailed])
def test_a_failure_keeps_its_kind_and_text_over_a_wire_that_knows_no_classes(kind: type[SyncFailed]) -> None:
    crossed = json.loads(json.dumps(astuple(Report.of(True, kind("bucket 3: it holds a")))))
    failure = Report(*crossed).failure()
    assert type(failure) is kind
    assert str(failure) == str(kind("bucket 3: it holds a"))


def test_any_other_failure_becomes_a_plain_failed_sync_with_its_class_and_words() -> None:
    failure = Report.of(False, MemoryError("4 GiB")).failure()
    assert type(failure) is SyncFailed
    assert str(failure) == "MemoryError: 4 GiB"


@pytest.mark.parametrize("updating", [True, False])
def test_a_report_of_success_has_no_failure(updating: bool) -> None:
    report = Report(*json.loads(json.dumps(astuple(Report.of(updating, None)))))
    assert report == Report(updating)
    assert report.failure() is None

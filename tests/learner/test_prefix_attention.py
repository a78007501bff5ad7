"""Attention in blocks against the formula written out over all tokens, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learner import attention, prefix_layout
from learner.attention import PackedRow, attend, mask_of, packed
from learner.prefix_layout import PrefixLayout, SharedRow, lay_out

ROWS = [SharedRow(0, 9, own) for own in (5, 0, 7, 1)] + [SharedRow(1, 4, 6), SharedRow(2, 1, 0), SharedRow(3, 9, 6)]


def plain(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """softmax(cap(q k^T * scale) + mask) v, key heads repeated."""
    shared = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(shared, 1).transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return (weights @ value.repeat_interleave(shared, 1)).transpose(1, 2)


def random_heads(tokens: int, rows: int = 1, value_width: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def one(heads: int, width: int) -> Tensor:
        drawn = torch.randn(rows, heads, tokens, width, generator=generator, dtype=torch.float64)
        return (2.0 * drawn).to(dtype).requires_grad_()

    return [one(4, 8), one(2, 8), one(2, value_width)]


def module() -> torch.nn.Module:
    found = torch.nn.Module()
    found.num_key_value_groups = 2
    return found


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), inputs))


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize(("softcap", "value_width"), [(None, 8), (3.0, 8), (None, 5)])
@pytest.mark.parametrize("blocks", [(256, 1 << 17), (3, 60)])
def test_values_and_gradients_are_those_of_the_formula(window, softcap, value_width, blocks, monkeypatch):
    monkeypatch.setattr(prefix_layout, "QUERY_BLOCK_TOKENS", blocks[0])
    monkeypatch.setattr(prefix_layout, "TILE_SCORES", blocks[1])
    layout = lay_out(ROWS)
    inputs = random_heads(layout.tokens, value_width=value_width)
    ours, _ = attend(module(), *inputs, PackedRow(layout).mask(window), scaling=0.3, softcap=softcap)
    exact = plain(*inputs, torch.from_numpy(layout.visible(window)), 0.3, softcap)
    torch.testing.assert_close(ours, exact)
    for mine, theirs in zip(gradients(ours, inputs), gradients(exact, inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_in_bfloat16_errors_are_those_of_its_rounding():
    layout = lay_out(ROWS)
    inputs = random_heads(layout.tokens, dtype=torch.bfloat16)
    ours, _ = attend(module(), *inputs, PackedRow(layout).mask(None), scaling=0.3)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = plain(*doubles, torch.from_numpy(layout.visible()), 0.3)
    assert float((ours.double() - exact).detach().norm() / exact.detach().norm()) < 2e-2
    for mine, theirs in zip(gradients(ours, inputs), gradients(exact, doubles), strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 2e-2


@pytest.mark.parametrize("length", [2, 60, attention.SHORT_ROW_TOKENS, attention.SHORT_ROW_TOKENS + 1])
def test_padded_bfloat16_rows_are_near_the_exact_values(length):
    inputs = random_heads(length, rows=2, dtype=torch.bfloat16)
    ours, _ = attend(module(), *inputs, None, scaling=0.3)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = plain(*doubles, torch.ones(length, length, dtype=torch.bool).tril(), 0.3)
    assert float((ours.double() - exact).detach().norm() / exact.detach().norm()) < 2e-2
    for mine, theirs in zip(gradients(ours, inputs), gradients(exact, doubles), strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 2e-2


@pytest.mark.parametrize("kind", ["causal", "boolean", "additive"])
def test_bent_scores_of_padded_rows_are_not_forgotten(kind):
    inputs = random_heads(7, rows=2, dtype=torch.float64)
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    mask = {
        "causal": None,
        "boolean": visible[None, None],
        "additive": torch.zeros(1, 1, 7, 7, dtype=torch.float64).masked_fill(~visible, float("-inf")),
    }[kind]
    ours, _ = attend(module(), *inputs, mask, scaling=0.3, softcap=2.0)
    torch.testing.assert_close(ours, plain(*inputs, visible, 0.3, 2.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_flex_attention_is_told_what_is_visible(window):
    from torch.nn.attention.flex_attention import create_mask

    layout = lay_out(ROWS)
    seen = attention.sees(PackedRow(layout).mask(window))
    found = create_mask(seen, 1, 1, layout.tokens, layout.tokens, device="cpu")
    assert (found[0, 0].numpy() == layout.visible(window)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_long_rows_on_a_gpu_go_to_flex_attention(window):
    rows = [SharedRow(group, 200, own) for group in range(2) for own in (150, 300, 280)]
    layout = lay_out(rows)
    assert layout.tokens >= attention.FLEX_ROW_TOKENS
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, layout.tokens, 64, generator=generator).cuda().requires_grad_() for heads in (4, 2, 2)
    ]
    mask = PackedRow(layout, "cuda").mask(window)
    ours, _ = attend(module(), *inputs, mask, scaling=0.125)
    assert mask.block_mask is not None
    exact = plain(*inputs, torch.from_numpy(layout.visible(window)).cuda(), 0.125)
    torch.testing.assert_close(ours, exact, atol=2e-3, rtol=2e-3)
    for mine, theirs in zip(gradients(ours, inputs), gradients(exact, inputs), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 5e-3


class Config:
    sliding_window = 5


def test_layers_of_an_unknown_kind_are_refused():
    arguments = {"batch_size": 1, "q_length": 5, "kv_length": 5, "config": Config()}
    row = PackedRow(lay_out(ROWS))
    with packed(row):
        assert mask_of(**arguments).window is None
        assert mask_of(**arguments, local_size=5).window == 5
        with pytest.raises(attention.LayoutUnsupported):
            mask_of(**arguments, local_size=4)
        with pytest.raises(attention.LayoutUnsupported):
            mask_of(**arguments, use_vmap=True)
    assert mask_of(**arguments) is None
    with pytest.raises(attention.LayoutUnsupported):
        attend(module(), *random_heads(row.layout.tokens), row.mask(None), s_aux=torch.zeros(4))


def test_a_window_that_nothing_outgrows_is_none():
    layout: PrefixLayout = lay_out(ROWS)
    row = PackedRow(layout)
    longest = int(layout.positions().max()) + 1
    assert row.mask(longest) is row.mask(None)
    assert row.mask(longest - 1) is not row.mask(None)


def test_nothing_between_the_passes_but_queries_keys_and_values():
    layout = lay_out(ROWS)
    inputs = random_heads(layout.tokens)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        attend(module(), *inputs, PackedRow(layout).mask(None))
    assert sum(kept) == sum(tensor.numel() for tensor in inputs)

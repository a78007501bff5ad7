"""Every layout of every family against transformers' plain forward pass of each row alone: log-probs and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner import logprobs, prefix_layout
from learner.layout_choice import choose_layout, why_padded
from learner.logprobs import LogprobModel, completion_logprobs
from learner.model import load_causal_lm
from learner.packing import Layout
from learner.token_batch import ScoredRow, token_batch
from system.core.errors import ConfigError
from system.core.model import ModelSettings
from tests.learner.model_families import DENSE, FAMILIES, PACKED, PADDED, save_family
from tests.learner.test_logprobs import plain_logprobs

Gradient = dict[str, torch.Tensor]
BOTH: tuple[Layout, ...] = ("shared_prefix", "padded")


def group_rows() -> list[ScoredRow]:
    """Two prompts with completions of 1 to 14 tokens, parts or all of them not wanted, and a group of one."""
    generator = np.random.default_rng(1)

    def tokens(count: int) -> np.ndarray:
        return generator.integers(0, 320, count).astype(np.int32)

    rows = []
    for prompt_length, lengths in ((9, (1, 9, 14, 3, 1)), (4, (6, 2, 13)), (1, (5,))):
        prompt = tokens(prompt_length)
        for length in lengths:
            wanted = generator.random(length) < 0.7 if length > 4 else None
            rows.append(ScoredRow(prompt, tokens(length), wanted))
    rows.append(ScoredRow(rows[0].prompt_tokens, tokens(4), np.zeros(4, bool)))
    rows.append(ScoredRow(rows[0].prompt_tokens, tokens(0)))
    return rows


def coefficients(rows: list[ScoredRow]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(len(row.columns), generator=generator) for row in rows]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp("families") / name)
        return made[name]

    return folder


def load(folder: Path, dtype: str = "float32") -> LogprobModel:
    model = LogprobModel(load_causal_lm(ModelSettings(path=str(folder), dtype=dtype)), 0.8)
    model.check_head()
    return model


def plain_gradient(folder: Path, rows: list[ScoredRow]) -> Gradient:
    """Of sum(coefficients * log-probs), row by row, all of it transformers' and eager."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    for row, weights in zip(rows, coefficients(rows), strict=True):
        if len(row.columns):
            (plain_logprobs(model, row, 0.8)[torch.from_numpy(row.columns)] * weights).sum().backward()
    return gradient_of(model)


def padded_left_gradient(folder: Path, rows: list[ScoredRow]) -> Gradient:
    """A third way: rows padded on the left, by transformers' attention mask and positions."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    whole = [np.concatenate([row.prompt_tokens, row.completion_tokens]) for row in rows]
    width = max(len(tokens) for tokens in whole)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for index, row in enumerate(whole):
        tokens[index, width - len(row) :] = torch.from_numpy(row)
        mask[index, width - len(row) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits / 0.8
    logprobs_ = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, tokens[:, 1:, None])[..., 0]
    loss = torch.zeros(())
    for index, (row, weights) in enumerate(zip(rows, coefficients(rows), strict=True)):
        completion = logprobs_[index, width - 1 - len(row.completion_tokens) :]
        loss = loss + (completion[torch.from_numpy(row.columns)] * weights).sum()
    loss.backward()
    return gradient_of(model)


def gradient_of(model: torch.nn.Module) -> Gradient:
    """Without what no row reaches, experts that no token chose."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def gap_between(ours: Gradient, theirs: Gradient) -> float:
    """Norm of the difference over the norm of ``theirs``."""
    assert ours.keys() == theirs.keys()
    gaps, norms = (
        torch.stack([gradient.norm() for gradient in gradients])
        for gradients in ([ours[name] - theirs[name] for name in theirs], theirs.values())
    )
    return float(gaps.norm() / norms.norm())


def assert_equal(ours: Gradient, theirs: Gradient, relative: float = 1e-5) -> None:
    """Within ``relative`` of the whole gradient's norm, and of each weight's with some room for its rounding."""
    assert gap_between(ours, theirs) <= relative
    whole = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for name in theirs:
        gap = (ours[name] - theirs[name]).norm()
        assert float(gap) <= 10 * relative * float(theirs[name].norm()) + relative * float(whole) / 10, name


@pytest.mark.parametrize("name", [*PACKED, *DENSE])
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("budget_tokens", [10_000, 25])
def test_logprobs_are_those_of_each_row_alone(folder_of, name, layout, budget_tokens):
    model, rows = load(folder_of(name)), group_rows()
    choose_layout(model, layout)
    assert model.layout == layout
    assert model.dense_mask == (layout == "shared_prefix" and name in DENSE)
    plain = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32, attn_implementation="eager")
    plain.eval()
    with torch.no_grad():
        for row, answer in zip(rows, completion_logprobs(model, rows, budget_tokens), strict=True):
            expected = np.zeros(len(row.completion_tokens), np.float32)
            expected[row.columns] = plain_logprobs(plain, row, 0.8).numpy()[row.columns]
            np.testing.assert_allclose(answer, expected, atol=2e-5)


@pytest.mark.parametrize("name", [*PACKED, *DENSE])
def test_gradients_are_those_of_each_row_alone_in_every_layout(folder_of, name, monkeypatch):
    rows = group_rows()
    expected = plain_gradient(folder_of(name), rows)
    assert_equal(padded_left_gradient(folder_of(name), rows), expected)
    monkeypatch.setattr(prefix_layout, "QUERY_BLOCK_TOKENS", 4)
    for layout in BOTH:
        model = load(folder_of(name))
        choose_layout(model, layout)
        weights = torch.cat(coefficients(rows))
        (model(token_batch(rows, layout=layout)) * weights).sum().backward()
        assert_equal(gradient_of(model.causal_lm), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("logits_rows", [1, 5, 1000])
@pytest.mark.parametrize("layout", BOTH)
def test_what_is_computed_again_changes_no_gradient(folder_of, layout, logits_rows, checkpointing, monkeypatch):
    rows = group_rows()
    expected = plain_gradient(folder_of("llama_tied"), rows)
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", {"cpu": 320 * 4 * logits_rows})
    monkeypatch.setattr(logprobs, "SOFTMAX_CHUNK_BYTES", {"cpu": 320 * 4 * 2})
    model = load(folder_of("llama_tied"))
    choose_layout(model, layout)
    if checkpointing:
        model.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        model.causal_lm.train()
    (model(token_batch(rows, layout=layout)) * torch.cat(coefficients(rows))).sum().backward()
    assert_equal(gradient_of(model.causal_lm), expected)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_layout_is_chosen_by_trying_and_the_reason_is_said(folder_of, name):
    model = load(folder_of(name))
    choose_layout(model, "auto")
    assert model.layout == ("padded" if name in PADDED else "shared_prefix"), model.layout_reason
    assert model.dense_mask == (name in DENSE)
    assert model.layout_reason
    assert why_padded(str(folder_of(name)), "auto") in (None, model.layout_reason)
    assert why_padded(str(folder_of(name)), "padded", "reference.layout") == "reference.layout is padded"
    if name in PADDED:
        assert why_padded(str(folder_of(name)), "auto") is not None or name == "gpt_oss"
        with pytest.raises(ConfigError, match=r"learner\.layout: shared_prefix is not possible"):
            choose_layout(model, "shared_prefix")
    choose_layout(model, "padded", "reference.layout")
    assert (model.layout, model.layout_reason) == ("padded", "reference.layout is padded")


@pytest.mark.parametrize("name", list(PADDED))
def test_families_that_cannot_share_have_the_logprobs_of_each_row_alone(folder_of, name):
    model, rows = load(folder_of(name)), group_rows()[:-1]
    choose_layout(model, "auto")
    plain = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32, attn_implementation="eager")
    plain.eval()
    with torch.no_grad():
        for row, answer in zip(rows, completion_logprobs(model, rows, 60), strict=True):
            np.testing.assert_allclose(answer[row.columns], plain_logprobs(plain, row, 0.8)[row.columns], atol=2e-5)


@pytest.mark.parametrize("name", list(PADDED))
def test_families_that_cannot_share_have_the_gradients_of_each_row_alone(folder_of, name):
    rows = group_rows()[:-1]
    model = load(folder_of(name))
    choose_layout(model, "auto")
    (model(token_batch(rows, layout=model.layout)) * torch.cat(coefficients(rows))).sum().backward()
    assert_equal(gradient_of(model.causal_lm), plain_gradient(folder_of(name), rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_completions_see_each_other_is_found_out(folder_of, dtype, monkeypatch):
    model = load(folder_of("llama"), dtype)
    choose_layout(model, "auto")
    assert model.layout == "shared_prefix"
    tiles_of = prefix_layout.tiles_of

    def leaking(layout: prefix_layout.PrefixLayout, window: int | None = None) -> list[prefix_layout.Tile]:
        """As if what stands between a prompt and a completion were prompt too."""
        runs = tuple(
            prefix_layout.Run(run.prefix_start, run.start - run.prefix_start, run.start, run.length)
            for run in layout.runs
        )
        return tiles_of(prefix_layout.PrefixLayout(runs, layout.tokens, layout.places), window)

    monkeypatch.setattr("learner.prefix_attention.tiles_of", leaking)
    choose_layout(model, "auto")
    assert model.layout == "padded"
    assert "differ by" in model.layout_reason


def test_an_attention_that_only_some_layers_share_is_found_out(folder_of):
    model = load(folder_of("llama"))
    model.causal_lm.config.num_hidden_layers = 3
    model.causal_lm.base_model.layers.append(torch.nn.Identity())
    model.causal_lm.base_model.layers[2].forward = lambda hidden, **_: hidden
    choose_layout(model, "auto")
    assert model.layout == "padded"
    assert "2 of its 3 layers" in model.layout_reason


def test_a_batch_says_what_it_computes_and_what_it_saved():
    rows = group_rows()
    packed, padded = token_batch(rows, layout="shared_prefix"), token_batch(rows)
    exact = sum(row.tokens for row in rows)
    prompts = sum(len(row.prompt_tokens) for row in rows)
    assert packed.counts.computed == packed.tokens.numel() == exact - (prompts - 9 - 4 - 1)
    assert packed.counts.padding_share == 0.0
    assert packed.counts.shared_prompt_share == pytest.approx(1 - 14 / prompts)
    assert padded.counts.padding_share == pytest.approx(1 - exact / padded.tokens.numel())
    assert padded.counts.shared_prompt_share == 0.0
    both = packed.counts + padded.counts
    assert both.computed == packed.tokens.numel() + padded.tokens.numel()

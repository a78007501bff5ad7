"""Log-probs of completion tokens against the plain full forward pass of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from learner import logprobs
from learner.layout_choice import choose_layout
from learner.logprobs import LogprobModel, completion_logprobs
from learner.model import load_causal_lm
from learner.token_batch import ScoredRow, token_batch
from system.core.errors import ConfigError
from system.core.model import ModelSettings
from tests.learner.model_families import save_family


def random_rows(count: int = 7, seed: int = 0, *, masked: bool = False) -> list[ScoredRow]:
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(generator.integers(1, 20))
        wanted = generator.random(length) < 0.6 if masked else None
        prompt = generator.integers(6, 262, generator.integers(1, 15))
        rows.append(ScoredRow(prompt, generator.integers(6, 262, length), wanted))
    return rows


def plain_logprobs(model: torch.nn.Module, row: ScoredRow, temperature: float) -> torch.Tensor:
    """One row, all positions, all of transformers: what everything else is held against."""
    tokens = torch.tensor(np.concatenate([row.prompt_tokens, row.completion_tokens])[None])
    logits = model(input_ids=tokens, use_cache=False).logits[0].float() / temperature
    predicted = torch.log_softmax(logits, dim=-1)[len(row.prompt_tokens) - 1 : -1]
    return predicted.gather(1, torch.tensor(row.completion_tokens)[:, None])[:, 0]


@pytest.fixture(scope="module", params=["tiny_llama", "tied_llama"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def load(folder: Path, temperature: float = 1.0, dtype: str = "float32") -> LogprobModel:
    return LogprobModel(load_causal_lm(ModelSettings(path=str(folder), dtype=dtype)), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_padded_rows_have_the_logprobs_of_each_row_alone(folder, temperature):
    model, rows = load(folder, temperature), random_rows()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = completion_logprobs(model, rows, budget_tokens=60)
    with torch.no_grad():
        for row, answer in zip(rows, answers, strict=True):
            assert answer.dtype == np.float32
            np.testing.assert_allclose(answer, plain_logprobs(plain, row, temperature).numpy(), atol=1e-5)


def test_gradients_are_those_of_the_plain_forward_pass(folder):
    model, rows = load(folder, 0.6), random_rows(masked=True)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = token_batch(rows)
    weights = torch.linspace(-1.0, 1.0, len(batch.target))
    (model(batch) * weights).sum().backward()
    whole = torch.cat([plain_logprobs(plain, row, 0.6)[torch.tensor(row.wanted)] for row in rows])
    (whole * weights).sum().backward()
    for (name, ours), theirs in zip(model.causal_lm.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_logits_never_take_more_than_their_bytes(folder, monkeypatch):
    """Most of them are computed again, chunk by chunk; the gradients are those of keeping all."""
    batch = token_batch(random_rows())
    kept, again = load(folder), load(folder)
    kept(batch).sum().backward()
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", {"cpu": 320 * 4 * 10})
    monkeypatch.setattr(logprobs, "SOFTMAX_CHUNK_BYTES", {"cpu": 320 * 4 * 2})
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda t: t):
        values = again(batch)
    assert len(batch.target) > 20
    assert sum(size for size in sizes if size % 320 == 0 and size // 320 in (5, len(batch.target))) == 5 * 320
    values.sum().backward()
    for ours, theirs in zip(again.parameters(), kept.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_the_head_is_one_call_in_however_many_pieces(folder, monkeypatch):
    """ZeRO-3 gathers weights around a module's call, on all ranks or none; each rank has tokens of its own number."""
    model, batch = load(folder), token_batch(random_rows())
    head, calls = model.causal_lm.get_output_embeddings(), []
    head.register_forward_pre_hook(lambda *_: calls.append("forward"))
    head.register_full_backward_hook(lambda *_: calls.append("backward"))
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", {"cpu": 320 * 4 * 10})
    with torch.no_grad():
        model(batch)
    assert calls == ["forward"]
    model(batch).sum().backward()
    assert calls == ["forward", "forward", "backward"]
    assert "forward" not in vars(head)


def test_tokens_that_are_not_wanted_have_no_logprob_and_no_gradient(folder):
    model = load(folder)
    row = ScoredRow(np.array([7, 8]), np.array([9, 10, 11, 12]), np.array([True, False, False, True]))
    batch = token_batch([row])
    assert batch.column.tolist() == [0, 3]
    padded = batch.padded(model(batch))
    assert padded.shape == (1, 4)
    assert padded[0, 1:3].tolist() == [0.0, 0.0]
    assert (padded[0, [0, 3]] < 0).all()


def test_the_token_softmax_has_the_exact_gradient(monkeypatch):
    monkeypatch.setattr(logprobs, "SOFTMAX_CHUNK_BYTES", {"cpu": 4 * 11 * 2})
    given = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    target, weights = torch.randint(0, 11, (5,)), torch.randn(5, dtype=torch.float64)
    ours = logprobs._TokenLogprobs.apply(given * 1.0, target, 0.7, False)[0]
    exact = torch.log_softmax(given / 0.7, dim=-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(ours, exact)
    gradients = [torch.autograd.grad((values * weights).sum(), given)[0] for values in (ours, exact)]
    torch.testing.assert_close(*gradients)


def test_the_gradient_is_written_over_the_logits_and_a_second_pass_is_refused():
    given = torch.randn(5, 11, requires_grad=True)
    logits = given * 1.0
    values = logprobs._TokenLogprobs.apply(logits, torch.zeros(5, dtype=torch.int64), 1.0, False)[0].sum()
    values.backward(retain_graph=True)
    assert torch.equal(given.grad, logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.backward()


@pytest.mark.parametrize("logits_rows", [1000, 7])
@pytest.mark.parametrize("layout", ["padded", "shared_prefix"])
def test_entropies_are_those_of_the_plain_softmax_and_change_no_gradient(folder, layout, logits_rows, monkeypatch):
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", {"cpu": 320 * 4 * logits_rows})
    monkeypatch.setattr(logprobs, "SOFTMAX_CHUNK_BYTES", {"cpu": 320 * 4 * 2})
    rows = random_rows(masked=True)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for row in rows:
        tokens = torch.tensor(np.concatenate([row.prompt_tokens, row.completion_tokens])[None])
        with torch.no_grad():
            logits = plain(input_ids=tokens).logits[0, len(row.prompt_tokens) - 1 : -1].double() / 0.6
        expected.append(torch.distributions.Categorical(logits=logits).entropy()[torch.from_numpy(row.wanted)])
    batch = token_batch(rows, layout=layout)
    gradients = []
    for with_entropy in (False, True):
        model = load(folder, 0.6)
        choose_layout(model, layout)
        assert model.entropies is None
        model.with_entropy = with_entropy
        (model(batch) * torch.linspace(-1.0, 1.0, len(batch.target))).sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
        with torch.no_grad():
            values = model.entropies
            model(batch)
        assert model.entropies is None  # of no use without a gradient, so not taken
    assert values is not None
    assert not values.requires_grad
    torch.testing.assert_close(values.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_token_of_probability_zero_adds_no_entropy():
    given = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -1e30, -torch.inf]], requires_grad=True)
    _, entropy = logprobs._TokenLogprobs.apply(given * 1.0, torch.zeros(2, dtype=torch.int64), 1.0, True)
    torch.testing.assert_close(entropy, torch.tensor([np.log(2.0), 0.0], dtype=torch.float32))


def test_no_entropy_is_taken_where_none_is_wanted(tiny_llama, monkeypatch):
    model, rows = load(tiny_llama), random_rows()
    monkeypatch.setattr(torch.linalg, "vecdot", None)
    model(token_batch(rows)).sum().backward()
    assert model.entropies is None


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="without prompt tokens"):
        token_batch([ScoredRow(np.array([], np.int64), np.array([5]))])


def test_bfloat16_logprobs_are_near_the_float32_ones(folder):
    rows = random_rows()
    exact = np.concatenate(completion_logprobs(load(folder), rows, 1000))
    half = np.concatenate(completion_logprobs(load(folder, dtype="bfloat16"), rows, 1000))
    assert np.abs(exact - half).mean() < 0.1


def test_a_soft_cap_on_the_logits_is_applied(tmp_path):
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, sliding_window=8, final_logit_softcapping=2.0, initializer_range=0.3,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    model.check_head()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rows = random_rows()
    with torch.no_grad():
        for row, answer in zip(rows, completion_logprobs(model, rows, 100), strict=True):
            np.testing.assert_allclose(answer, plain_logprobs(plain, row, 1.0).numpy(), atol=1e-5)


def test_a_head_that_does_more_than_is_known_is_refused(tiny_llama):
    model = load(tiny_llama)
    model.causal_lm.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.0)
    model.check_head()
    model._logit_scale = 0.5
    with pytest.raises(ConfigError, match="llama"):
        model.check_head()


def test_a_model_without_a_body_of_its_own_is_refused(tmp_path, monkeypatch):
    model = load(save_family("gpt2", tmp_path))
    monkeypatch.setattr(type(model.causal_lm), "base_model_prefix", "elsewhere")
    with pytest.raises(ConfigError, match="gpt2' have no part that gives hidden states"):
        model.check_head()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path)


def test_weights_that_are_missing_are_not_made_up(tiny_llama, tmp_path):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    weights = load_file(tiny_llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="up_proj"):
        load(tmp_path)


def test_an_impossible_temperature_is_refused(tiny_llama):
    with pytest.raises(ConfigError, match="temperature"):
        load(tiny_llama, 0.0)

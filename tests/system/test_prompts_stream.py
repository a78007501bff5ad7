"""The prompt stream: a pure function of seed and position; templates and tokenizers run once."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import pytest

from system.core.errors import ConfigError, DataError
from system.prompts import DataSourceSettings, PromptStream, PromptStreamFactory
from system.prompts import stream as stream_module
from tests.tiny_models import byte_tokenizer

BOS, END, USER, ASSISTANT = 1, 5, 3, 4


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def source(tmp_path):
    def write(prompts, name="train", **keys):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt, "label": n}) + "\n" for n, prompt in enumerate(prompts)))
        return DataSourceSettings(source=str(path), **keys)

    return write


def ids(stream, positions):
    return [stream.prompt(position).prompt_id for position in positions]


def test_the_same_position_gives_the_same_prompt_in_another_process_and_order(source, tokenizer):
    sources = [source([f"a{n}" for n in range(7)], "a"), source([f"b{n}" for n in range(3)], "b", weight=0.5)]
    stream, resumed = PromptStream(sources, tokenizer, seed=1), PromptStream(sources, tokenizer, seed=1)
    uninterrupted = [stream.prompt(position) for position in range(60)]
    assert [resumed.prompt(position) for position in reversed(range(60))] == uninterrupted[::-1]
    assert ids(PromptStream(sources, tokenizer, seed=2), range(60)) != ids(stream, range(60))


def test_an_epoch_shows_every_row_once_and_the_next_goes_on_in_another_order(source, tokenizer):
    stream = PromptStream([source([f"{n}" for n in range(11)])], tokenizer, seed=0)
    epochs = [ids(stream, range(11 * epoch, 11 * (epoch + 1))) for epoch in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 11 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_every_step_holds_its_quota_of_each_source(source, tokenizer):
    sources = [source([f"a{n}" for n in range(50)], "a", weight=3), source(["b0", "b1"], "b", weight=1)]
    stream = PromptStream(sources, tokenizer, seed=0)
    for step in range(10):
        assert Counter(stream.prompt(p).source for p in range(4 * step, 4 * step + 4)) == {"a": 3, "b": 1}


def test_two_equal_prompts_are_two_positions(source, tokenizer):
    stream = PromptStream([source(["same", "same"])], tokenizer, seed=0)
    first, second = stream.prompt(0), stream.prompt(1)
    assert first.tokens == second.tokens
    assert first.prompt_id != second.prompt_id


def test_a_template_is_applied_once_and_adds_no_second_special_tokens(source, tokenizer):
    prompt = PromptStream([source(["2+2"], suffix=" =")], tokenizer, seed=0).prompt(0)
    assert tokenizer.decode(prompt.tokens) == "<|user|>2+2 =<|end|><|assistant|>"
    assert [prompt.tokens.count(special) for special in (USER, END, ASSISTANT, BOS)] == [1, 1, 1, 0]
    assert prompt.text == "2+2 ="
    assert prompt.label == 0


def test_plain_text_gets_what_the_tokenizer_adds_by_itself(source):
    from tokenizers.processors import TemplateProcessing

    adding = byte_tokenizer()
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    plain = PromptStream([source(["2+2"], chat_template=False)], adding, seed=0).prompt(0)
    assert plain.tokens[0] == BOS
    assert adding.decode(plain.tokens[1:]) == "2+2"
    chat = PromptStream([source(["2+2"])], adding, seed=0).prompt(0)
    assert BOS not in chat.tokens


def test_chat_messages_keep_their_turns_and_get_the_system_prompt(source, tokenizer):
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "2+2"},
    ]  # fmt: skip
    prompt = PromptStream([source([messages], system_prompt="Be brief.", suffix="=")], tokenizer, seed=0).prompt(0)
    assert [message["role"] for message in prompt.text] == ["system", "user", "assistant", "user"]
    assert prompt.text[-1]["content"] == "2+2="
    assert tokenizer.decode(prompt.tokens) == (
        "<|user|>Be brief.<|end|><|user|>hi<|end|><|assistant|>ho<|end|><|user|>2+2=<|end|><|assistant|>"
    )


def test_arguments_reach_the_chat_template(source):
    thinking = byte_tokenizer()
    thinking.chat_template = "{{ messages[0]['content'] }}{% if think %} /think{% endif %}"
    stream = PromptStream([source(["2+2"], chat_template={"think": True})], thinking, seed=0)
    assert thinking.decode(stream.prompt(0).tokens) == "2+2 /think"


def test_a_model_without_a_template_takes_plain_text_or_says_so(source):
    bare = byte_tokenizer()
    bare.chat_template = None
    assert bare.decode(PromptStream([source(["2+2"])], bare, seed=0).prompt(0).tokens) == "2+2"
    with pytest.raises(ConfigError, match="no template; use chat_template: false"):
        PromptStream([source(["2+2"], chat_template={})], bare, seed=0)
    with pytest.raises(ConfigError, match="system_prompt needs a chat template"):
        PromptStream([source(["2+2"], system_prompt="x")], bare, seed=0)
    with pytest.raises(DataError, match=r"train.jsonl:1: chat messages need a chat template"):
        PromptStream([source([[{"role": "user", "content": "x"}]])], bare, seed=0)


def test_a_template_that_fails_is_named(source):
    failing = byte_tokenizer()
    failing.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(DataError, match="data 'train': the model's chat template fails: no users here"):
        PromptStream([source(["2+2"])], failing, seed=0)


@pytest.mark.parametrize("prompt", [7, None, [], ["text"], [{"role": "user"}]])
def test_a_prompt_that_is_neither_text_nor_messages_is_named_with_its_line(source, tokenizer, prompt):
    with pytest.raises(DataError, match=r"train.jsonl:2: "):
        PromptStream([source(["fine", prompt])], tokenizer, seed=0)


@pytest.mark.parametrize(("prompt", "message"), [("", "the prompt is empty"), ("a \ud800", "not valid Unicode")])
def test_a_prompt_that_no_model_can_go_on_from_is_named_with_its_line(source, tokenizer, prompt, message):
    with pytest.raises(DataError, match=rf"train.jsonl:1: {message}|train.jsonl:1: .*{message}"):
        PromptStream([source([prompt], chat_template=False)], tokenizer, seed=0).prompt(0)


def test_over_long_prompts_leave_the_epoch_and_are_counted(source, tokenizer):
    stream = PromptStream([source(["short", "x" * 50, "brief", "y" * 90], max_prompt_tokens=20)], tokenizer, seed=0)
    for epoch in range(5):
        assert {stream.prompt(p).text for p in (2 * epoch, 2 * epoch + 1)} == {"short", "brief"}
    summary = stream.summary()[0]
    assert (summary.rows, summary.measured, summary.skipped) == (4, 4, 2)
    assert "2 of 4 measured are longer and skipped (longest: train/3, 93 tokens)" in str(summary)


def test_the_models_context_limits_prompts_too(source, tokenizer):
    sources = [source(["short", "x" * 50], max_prompt_tokens=60)]
    stream = PromptStream(sources, tokenizer, seed=0, longest_prompt_tokens=30)
    assert {stream.prompt(position).text for position in range(6)} == {"short"}
    with pytest.raises(DataError, match="none of 2 prompts fits in 5 tokens; the shortest has 8"):
        PromptStream(sources, tokenizer, seed=0, longest_prompt_tokens=5)
    with pytest.raises(ConfigError, match="no room for a prompt"):
        PromptStream(sources, tokenizer, seed=0, longest_prompt_tokens=0)


def test_a_large_source_is_measured_only_when_its_turn_comes(source, tokenizer, monkeypatch):
    monkeypatch.setattr(stream_module, "INDEXED_ROWS", 10)
    prompts = [f"{n}" if n % 3 else "x" * 99 for n in range(40)]
    sources = [source(prompts, max_prompt_tokens=20)]
    stream = PromptStream(sources, tokenizer, seed=0)
    assert stream.summary()[0].measured < 10
    epoch = [stream.prompt(position) for position in range(40)]
    assert {prompt.text for prompt in epoch} == {f"{n}" for n in range(40) if n % 3}
    other = PromptStream(sources, tokenizer, seed=0)
    assert [other.prompt(position) for position in (33, 7, 21)] == [epoch[33], epoch[7], epoch[21]]
    with pytest.raises(DataError, match="none of 40 prompts fits"):
        PromptStream([source(["x" * 99] * 40, max_prompt_tokens=20)], tokenizer, seed=0)


def test_a_factory_makes_the_same_stream_elsewhere(source, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "model")
    factory = PromptStreamFactory((source(["a", "b", "c"]),), str(tmp_path / "model"), seed=3)
    here, there = factory(), pickle.loads(pickle.dumps(factory))()
    assert [here(position) for position in range(9)] == [there.prompt(position) for position in range(9)]


def test_a_folder_without_a_tokenizer_is_named(source, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty holds no tokenizer"):
        PromptStreamFactory((source(["a"]),), str(tmp_path / "empty"), seed=0)()

"""Offline preference pairs: read by position, tokenised as the engine would, refused with the row and the mend."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from system.core.errors import ConfigError, DataError
from system.parts import PairSupply
from system.prompts.pairs import OfflinePairs
from system.recipe import check_recipe, load_recipe
from tests.system.test_recipe_checks import RECIPE
from tests.tiny_models import byte_tokenizer, save_tiny_llama

PAIRS = [{"prompt": f"{number}+1=", "chosen": f"{number + 1}", "rejected": "no"} for number in range(5)]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def written(tmp_path):
    def write(rows, name="pairs.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


def test_a_pair_is_a_group_of_two_with_an_id_below_zero(written, tokenizer):
    pairs = OfflinePairs(written(PAIRS), tokenizer, seed=0)
    group = pairs.group(3)
    assert group.group_id == -4
    chosen, rejected = group.rows
    assert chosen.offline
    assert rejected.offline
    assert (chosen.reward, rejected.reward) == (1.0, 0.0)
    assert chosen.prompt_tokens.tolist() == rejected.prompt_tokens.tolist()
    assert rejected.completion_text == "no"
    assert rejected.completion_tokens.tolist() == [*tokenizer("no")["input_ids"], tokenizer.eos_token_id]
    assert np.isnan(chosen.rollout_logprobs).all()


def test_a_pass_over_the_file_takes_every_pair_once_and_is_the_same_again(written, tokenizer):
    path = written(PAIRS)
    pairs = OfflinePairs(path, tokenizer, seed=7)
    texts = [pairs.group(position).rows[0].completion_text for position in range(10)]
    assert sorted(texts[:5]) == sorted(texts[5:]) == ["1", "2", "3", "4", "5"]
    assert texts[:5] != texts[5:]
    again = OfflinePairs(path, tokenizer, seed=7)
    assert [again.group(position).rows[0].completion_text for position in range(10)] == texts


def test_pairs_are_read_from_parquet_and_prompts_may_be_chats(tmp_path, tokenizer):
    prompts = [[{"role": "user", "content": "2+2="}]]
    table = pa.table({"prompt": prompts, "chosen": ["4"], "rejected": ["5"]})
    parquet.write_table(table, tmp_path / "pairs.parquet")
    chat = OfflinePairs(str(tmp_path / "pairs.parquet"), tokenizer, seed=0).group(0)
    assert [row.completion_text for row in chat.rows] == ["4", "5"]
    assert "2+2=" in tokenizer.decode(chat.rows[0].prompt_tokens)


def test_pairs_beyond_the_context_are_skipped(written, tokenizer):
    long = {"prompt": "x" * 100, "chosen": "a", "rejected": "b" * 60}
    pairs = OfflinePairs(written([*PAIRS, long]), tokenizer, seed=0, longest_tokens=128)
    assert {pairs.group(position).rows[1].completion_text for position in range(12)} == {"no"}
    assert len(pairs.skipped) == 1
    with pytest.raises(DataError, match=r"none of 1 pairs fits the model's context of 128 tokens"):
        OfflinePairs(written([long], "long.jsonl"), tokenizer, seed=0, longest_tokens=128)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2=", "chosen": "4"}, "no column 'rejected'"),
        ({"prompt": "2+2=", "chosen": ["4"], "rejected": "5"}, "chosen: a completion must be text, got list"),
        ({"prompt": 4, "chosen": "4", "rejected": "5"}, "a prompt must be text or a list of chat messages"),
    ],
)
def test_a_row_that_is_no_pair_is_named(written, tokenizer, row, message):
    with pytest.raises(DataError, match=rf"pairs\.jsonl:1: .*{message}"):
        OfflinePairs(written([row]), tokenizer, seed=0)


class CountingReference:
    def __init__(self):
        self.asked = 0

    async def logprobs(self, rows):
        self.asked += len(rows)
        return [np.full(len(row.completion_tokens), -1.0, np.float32) for row in rows]


def test_each_step_has_its_own_pairs_with_reference_logprobs(written, tokenizer):
    reference = CountingReference()
    supply = PairSupply(OfflinePairs(written(PAIRS), tokenizer, seed=0), 2, reference)
    groups = asyncio.run(supply.groups(step=1))
    assert [group.group_id for group in groups] == [-3, -4]
    assert reference.asked == 4
    assert all((row.reference_logprobs == -1.0).all() for group in groups for row in group.rows)
    assert all(len(row.reference_logprobs) == row.length for group in groups for row in group.rows)
    assert not math.isnan(groups[0].rows[0].reward)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("partners")
    save_tiny_llama(folder / "model")
    save_tiny_llama(folder / "teacher", seed=1, layers=1)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder), encoding="utf-8")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS), encoding="utf-8")
    return folder


@pytest.fixture
def check(folder):
    def checked(*overrides):
        return check_recipe(load_recipe(folder / "recipe.yaml", overrides), assume_gpus=0)

    return checked


def test_f_hal_is_refused_without_pairs_and_plans_them_otherwise(check, folder):
    with pytest.raises(ConfigError, match=r"objective\.offline_file: f_hal also learns from preference pairs"):
        check("objective.name=f_hal")
    with pytest.raises(DataError, match=r"no file .*pair\.jsonl; did you mean 'pairs\.jsonl'"):
        check("objective.name=f_hal", f"objective.offline_file={folder}/pair.jsonl")
    plan = check("objective.name=f_hal", f"objective.offline_file={folder}/pairs.jsonl")
    assert plan.pairs.pairs_per_step == 6
    assert plan.needs_reference
    lines = {line.label: line.value for line in plan.lines}
    assert lines["offline pairs per step"] == f"6 of {folder}/pairs.jsonl"
    with pytest.raises(ConfigError, match=r"objective\.offline_pairs_per_step: 1 pairs do not reach"):
        check(
            "objective.name=f_hal", f"objective.offline_file={folder}/pairs.jsonl",
            "objective.offline_pairs_per_step=1", "learner.minibatches_per_step=2",
        )  # fmt: skip
    assert check("objective.name=f_grpo").pairs is None


def test_distillation_needs_a_teacher_that_shares_the_tokenizer(check, folder):
    with pytest.raises(ConfigError, match=r"reference\.path: objective opd learns from another model"):
        check("objective.name=opd")
    plan = check("objective.name=opd", f"reference.path={folder}/teacher")
    assert plan.needs_reference
    with pytest.raises(ConfigError, match=r"reference\.path: no model folder at .*nowhere"):
        check("objective.name=opd", f"reference.path={folder}/nowhere")
    with pytest.raises(ConfigError, match=r"reference\.path has no effect: objective grpo needs no reference"):
        check(f"reference.path={folder}/teacher")


def test_a_teacher_with_another_tokenizer_is_refused(check, folder, tmp_path):
    save_tiny_llama(tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = written["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has another tokenizer than model\.path .* \(2 tokens differ, among them"):
        check("objective.name=opd", f"reference.path={tmp_path / 'other'}")


def test_objectives_whose_optimum_does_not_depend_on_the_sampler_bear_staleness(check):
    for name in ("gvpo", "online_dpo", "ipo"):
        assert check(f"objective.name={name}").placement
    with pytest.raises(ConfigError, match=r"objective\.correction: none with stream\.max_staleness"):
        check("objective.name=gift", "objective.correction=none")


@pytest.mark.parametrize(("name", "needs"), [("gift", False), ("gvpo", False), ("online_dpo", True), ("f_grpo", True)])
def test_a_reference_worker_is_planned_for_exactly_those_that_read_it(check, name, needs):
    assert check(f"objective.name={name}").needs_reference == needs

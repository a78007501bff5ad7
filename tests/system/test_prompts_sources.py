"""Rows of data sources: read as they stand, and refused with the file, the line and the mend."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from system.core.errors import ConfigError, DataError
from system.core.settings import parse_settings
from system.prompts.rows import open_rows
from system.prompts.settings import DataSourceSettings, named_sources


def rows_of(**keys):
    return open_rows(named_sources([DataSourceSettings(**keys)])[0], seed=0)


@pytest.fixture
def lines(tmp_path):
    def write(*values, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join(v if isinstance(v, str) else json.dumps(v) + "\n" for v in values), encoding="utf-8")
        return str(path)

    return write


LABELS = ["004", 4, 4.0, None, ["4", "vier"], {"answer": 4, "unit": "é"}, True]


def test_labels_reach_the_reward_exactly_as_written(lines):
    rows = rows_of(source=lines(*({"prompt": "2+2", "label": label} for label in LABELS)))
    read = [rows.row(index).label for index in range(len(rows))]
    assert read == LABELS
    assert [type(label) for label in read] == [type(label) for label in LABELS]


def test_columns_may_have_any_name(lines):
    rows = rows_of(
        source=lines({"q": "2+2", "gold": "4", "uid": 17, "level": 3, "topic": "sums"}),
        prompt_column="q", label_column="gold", id_column="uid", metadata_columns=["level", "topic"],
    )  # fmt: skip
    row = rows.row(0)
    assert (row.question, row.label, row.prompt_id) == ("2+2", "4", "17")
    assert json.loads(row.metadata) == {"level": 3, "topic": "sums"}


def test_a_metadata_column_is_taken_as_it_is(lines):
    text = '{"b":1,  "a": "é"}'
    rows = rows_of(source=lines({"prompt": "x", "metadata": text}, {"prompt": "y", "metadata": {"k": [1]}}))
    assert rows.row(0).metadata == text
    assert json.loads(rows.row(1).metadata) == {"k": [1]}


def test_blank_lines_do_not_count(lines):
    rows = rows_of(source=lines({"prompt": "a"}, "\n", "  \n", {"prompt": "b"}))
    assert [rows.row(index).question for index in range(len(rows))] == ["a", "b"]
    assert rows.row(1).where.endswith("train.jsonl:4")


def test_a_limit_takes_the_first_rows(lines):
    assert len(rows_of(source=lines(*({"prompt": str(n)} for n in range(10))), limit=3)) == 3


def test_parquet_and_json_lines_give_the_same_rows(lines, tmp_path):
    values = [{"prompt": f"{n}+{n}", "label": str(2 * n), "metadata": {"n": n}} for n in range(5)]
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(values), path)
    tables, texts = rows_of(source=str(path)), rows_of(source=lines(*values))
    for index in range(5):
        table, text = tables.row(index), texts.row(index)
        assert (table.question, table.label, table.metadata, table.prompt_id) == (
            text.question, text.label, text.metadata, text.prompt_id,
        )  # fmt: skip


def test_chat_messages_in_parquet_are_messages(tmp_path):
    path = tmp_path / "chat.parquet"
    messages = [{"role": "user", "content": "2+2"}]
    parquet.write_table(pa.Table.from_pylist([{"prompt": messages}]), path)
    assert rows_of(source=str(path)).row(0).question == messages


def test_a_saved_data_set_is_read_by_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list([{"prompt": "a", "label": 1}]),
        test=datasets.Dataset.from_list([{"prompt": "b", "label": 2}, {"prompt": "c", "label": 3}]),
    )
    both.save_to_disk(str(tmp_path / "saved"))
    rows = rows_of(source="huggingface", dataset=str(tmp_path / "saved"), split="test")
    assert [(rows.row(i).question, rows.row(i).label) for i in range(len(rows))] == [("b", 2), ("c", 3)]
    with pytest.raises(DataError, match="no split 'trian'; did you mean 'train'"):
        rows_of(source="huggingface", dataset=str(tmp_path / "saved"), split="trian")


def test_a_folder_of_data_files_is_read(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    rows = rows_of(source="huggingface", dataset=str(tmp_path / "folder"))
    assert [rows.row(i).question for i in range(len(rows))] == ["a", "b"]


def test_reasoning_gym_hands_its_whole_entry_to_the_reward():
    rows = rows_of(source="reasoning_gym", task="chain_sum", options={"size": 20, "seed": 3})
    row, again = rows.row(7), rows_of(source="reasoning_gym", task="chain_sum", options={"size": 20, "seed": 3}).row(7)
    assert row == again
    entry = json.loads(row.metadata)
    assert entry["answer"] == row.label
    assert entry["question"] == row.question
    assert entry["metadata"]["source_dataset"] == "chain_sum"
    assert len(rows) == 20


def test_questions_of_reasoning_gym_follow_the_seed_of_the_run():
    source = named_sources([DataSourceSettings(source="reasoning_gym", task="chain_sum")])[0]
    one, other = open_rows(source, seed=0), open_rows(source, seed=1)
    assert open_rows(source, seed=0).row(0) == one.row(0)
    assert [one.row(i).question for i in range(5)] != [other.row(i).question for i in range(5)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((), "train.jsonl is empty; it needs one JSON object per line"),
        (("\n", "\n"), "is empty"),
        (({"prompt": "a"},) * 6 + ('{"prompt": "b"\n',), r"train.jsonl:7: not valid JSON"),
        (('{"prompt": "a", "answer": ' + "9" * 5000 + "}\n",), r"train.jsonl:1: not valid JSON"),
        (('{"prompt": ' + "[" * 100_000 + "\n",), r"train.jsonl:1: not valid JSON"),
        (({"prompt": "a"}, "[1]\n"), r"train.jsonl:2: expected a JSON object with columns, got list"),
        (({"promt": "a", "answer": 1},), r"train.jsonl:1: no column 'prompt'; did you mean 'promt'\?. Columns: answer"),
        (({"prompt": "a"}, {"text": "b"}), r"train.jsonl:2: no column 'prompt'; valid: text"),
        (({"prompt": "a", "metadata": "no object"},), "metadata is text, but not a JSON object"),
    ],
)
def test_a_broken_file_is_named_with_its_line(lines, content, message):
    with pytest.raises(DataError, match=message):
        rows_of(source=lines(*content)).row(0)


def test_a_label_column_that_was_asked_for_must_be_there(lines):
    with pytest.raises(DataError, match="no column 'anser'; did you mean 'answer'"):
        rows_of(source=lines({"prompt": "a", "answer": "b"}), label_column="anser")


def test_a_missing_file_is_named_with_its_nearest_neighbour(lines, tmp_path):
    lines({"prompt": "a"})
    with pytest.raises(DataError, match=r"no file .*trian.jsonl; did you mean 'train.jsonl'"):
        rows_of(source=str(tmp_path / "trian.jsonl"))


def test_kinds_of_source_that_nobody_reads_are_named(tmp_path):
    (tmp_path / "train.csv").write_text("prompt\n")
    with pytest.raises(DataError, match=r"train.csv is not a known kind of source. Known: .*a .jsonl file, a .parquet"):
        rows_of(source=str(tmp_path / "train.csv"))
    with pytest.raises(DataError, match="did you mean 'huggingface'"):
        rows_of(source="hugingface")


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "train.parquet").write_text("not parquet at all")
    with pytest.raises(DataError, match=r"train.parquet is not a readable Parquet file"):
        rows_of(source=str(tmp_path / "train.parquet"))


@pytest.mark.parametrize(
    ("options", "task", "message"),
    [
        ({}, "chain_sums", "reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'"),
        ({"min_term": 2}, "chain_sum", "has no option 'min_term'; did you mean 'min_terms'"),
        ({"min_terms": 5, "max_terms": 2}, "chain_sum", "refuses its options: max_terms must be >= min_terms"),
    ],
)
def test_reasoning_gym_refuses_by_name(options, task, message):
    with pytest.raises(DataError, match=message):
        rows_of(source="reasoning_gym", task=task, options=options)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "a.jsonl", "task": "chain_sum"}, "'task' has no effect for source file a.jsonl"),
        ({"source": "reasoning_gym"}, "needs 'task'"),
        ({"source": "reasoning_gym", "task": "gcd", "prompt_column": "q"}, "'prompt_column' has no effect"),
        ({"source": "huggingface"}, "needs 'dataset'"),
        ({"source": "a.jsonl", "weight": 0}, "greater than 0"),
        ({"source": "a.jsonl", "chat_template": True}, "true has no meaning here"),
        ({"source": "a.jsonl", "system_prompt": "Hi", "chat_template": False}, "system_prompt needs a chat template"),
        ({"source": "a.jsonl", "wieght": 1}, "did you mean 'weight'"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(DataSourceSettings, keys, "data.0")


def test_names_are_derived_and_unique():
    sources = [
        DataSourceSettings(source="a/train.jsonl"),
        DataSourceSettings(source="b/train.jsonl"),
        DataSourceSettings(source="reasoning_gym", task="gcd"),
        DataSourceSettings(source="huggingface", dataset="org/maths"),
        DataSourceSettings(source="c.jsonl", name="train"),
    ]
    assert [source.name for source in named_sources(sources)] == ["train-2", "train-3", "gcd", "maths", "train"]
    with pytest.raises(ConfigError, match="two sources are named 'x'"):
        named_sources([DataSourceSettings(source="a.jsonl", name="x"), DataSourceSettings(source="b.jsonl", name="x")])
    with pytest.raises(ConfigError, match="no source"):
        named_sources([])

"""Models in and out: plain folders that load everywhere, whole or not there."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from system.core.errors import CheckpointDamaged, ConfigError
from system.models import MARKER, export_model, import_model, installed_smollm2
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("source") / "tiny", tied=True)


def test_an_imported_folder_has_the_same_weights_in_the_dtype_asked_for(tiny, tmp_path):
    folder = import_model(str(tiny), tmp_path / "model", dtype="float32")
    source, imported = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (tiny, folder))
    for name, value in source.state_dict().items():
        assert torch.equal(value, imported.state_dict()[name]), name
    assert AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(tiny).chat_template
    half = AutoModelForCausalLM.from_pretrained(import_model(str(tiny), tmp_path / "half"), dtype="auto")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_every_id_that_ends_an_answer_is_in_the_generation_config(tiny, tmp_path):
    folder = import_model(str(tiny), tmp_path / "model")
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == {5, 2}
    assert ends[0] == AutoTokenizer.from_pretrained(folder).eos_token_id == 5


def test_importing_again_changes_nothing_and_other_content_is_not_overwritten(tiny, tmp_path):
    folder = import_model(str(tiny), tmp_path / "model")
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert import_model(str(tiny), folder) == folder
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    with pytest.raises(ConfigError, match=r"is not an import of .* in float32"):
        import_model(str(tiny), folder, dtype="float32")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="choose another folder or remove it"):
        import_model(str(tiny), tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


def test_a_failed_import_leaves_nothing_behind(tiny, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        import_model(str(broken), tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_what_an_ended_process_left_behind_is_removed(tiny, tmp_path):
    stale = tmp_path / ".model.999999999.tmp"
    stale.mkdir()
    import_model(str(tiny), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.gguf", "no file nowhere.gguf"),
        ("/nowhere/model", "no model at /nowhere/model: give a .gguf file"),
    ],
)
def test_a_source_that_is_not_there_is_named(tmp_path, source, message):
    with pytest.raises(ConfigError, match=message):
        import_model(source, tmp_path / "model")


def test_a_folder_without_tokenizer_or_config_is_named(tiny, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ConfigError, match="bare holds no tokenizer"):
        import_model(str(bare), tmp_path / "model")
    (bare / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"it has no config.json"):
        import_model(str(bare), tmp_path / "model")


def test_a_checkpoint_is_exported_as_the_plain_folder_it_holds(tiny, tmp_path):
    for step in (5, 10):
        shutil.copytree(tiny, tmp_path / "run" / "checkpoints" / f"step_{step:06d}" / "hf")
    (tmp_path / "run" / "checkpoints" / "step_000010" / "hf" / "newest").touch()
    folder = export_model(tmp_path / "run", tmp_path / "out")
    assert (folder / "newest").exists()
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 64
    older = export_model(tmp_path / "run" / "checkpoints" / "step_000005", tmp_path / "older")
    assert not (older / "newest").exists()
    with pytest.raises(ConfigError, match="out exists"):
        export_model(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match="no checkpoint at"):
        export_model(tmp_path / "nowhere", tmp_path / "other")


def test_a_damaged_checkpoint_is_not_exported(tiny, tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step_000005"
    shutil.copytree(tiny, checkpoint / "hf")
    (checkpoint / "hf" / "config.json").unlink()
    with pytest.raises(CheckpointDamaged, match="not a complete model"):
        export_model(checkpoint, tmp_path / "out")
    (checkpoint / "manifest.json").write_text(json.dumps({"hf/config.json": {"bytes": 10}}))
    with pytest.raises(CheckpointDamaged, match=r"hf/config.json is missing"):
        export_model(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_smollm2_is_imported_without_a_network_and_answers(tmp_path):
    installed_smollm2()
    folder = import_model("smollm2", tmp_path / "smollm2")
    assert json.loads((folder / MARKER).read_text())["source"] == "smollm2"
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert next(model.parameters()).dtype == torch.bfloat16
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1].item() in model.generation_config.eos_token_id

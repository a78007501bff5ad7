"""What a recipe can name."""

from __future__ import annotations

import pytest

from system.catalog import catalog, print_catalog
from system.core.errors import ConfigError


def test_every_objective_is_listed_with_a_line_and_its_options():
    entries = {entry.name: entry for entry in catalog("objectives")}
    assert {"grpo", "two_grpo"} <= set(entries)
    assert all(entry.summary for entry in entries.values())
    options = {option.name: option for option in entries["two_grpo"].options}
    assert options["clip_high"].default == "0.28"
    assert options["dual_clip"].type == "float | null"
    assert options["kl_where"].type == "loss | reward"
    assert all(option.description for option in options.values())


def test_every_reward_is_listed_with_its_options():
    entries = {entry.name: entry for entry in catalog("rewards")}
    assert "exact_last_integer" in entries
    assert {option.name: option.default for option in entries["regex"].options}["pattern"] == "required"
    assert all(entry.summary for entry in entries.values())


def test_one_entry_is_printed_with_its_options(capsys):
    print_catalog("objectives", "grpo")
    printed = capsys.readouterr().out
    assert "kl_coefficient" in printed
    assert "two_grpo" not in printed


def test_unknown_kinds_and_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="no list of 'objective'; did you mean 'objectives'"):
        catalog("objective")
    with pytest.raises(ConfigError, match="no objective 'grop'; did you mean 'grpo'"):
        catalog("objectives", "grop")
    with pytest.raises(ConfigError, match="no reward 'exact'"):
        catalog("rewards", "exact")
    with pytest.raises(ConfigError, match="no divergence 'kl'"):
        catalog("divergences", "kl")

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
    with pytest.raises(ConfigError, match="no divergence 'perason'; did you mean 'pearson'"):
        catalog("divergences", "perason")


def test_every_objective_says_its_formula_its_source_and_what_is_its_own():
    for entry in catalog("objectives"):
        assert "L = " in entry.details, entry.name
        assert entry.source, entry.name
    (gift,) = catalog("objectives", "gift")
    assert {"anchor", "beta", "statistics", "std_floor"} == gift.own
    assert gift.source.startswith("2510.23868")
    assert "Its gradient mixes the completions of a group." in gift.details
    assert "correction: token_tis is refused: weights inside group statistics are ill-defined" in gift.details


def test_every_divergence_shows_both_of_its_branches():
    for entry in catalog("divergences"):
        assert "a > 0: -g(r)" in entry.details
        assert "a < 0: f*(g(r))" in entry.details
    (kl,) = catalog("divergences", "kl")
    assert "-1.000, +0.368" in kl.details
    assert "linear beyond |r| = 10  a < 0" in kl.details


def test_the_list_shows_options_defaults_and_sources(capsys):
    print_catalog("objectives")
    printed = " ".join(capsys.readouterr().out.split())
    assert "divergence: pearson, beta: 0.1, kappa: null, gamma: 0.0" in printed
    assert "2602.05946" in printed
    assert "zero_variance keep" in printed
    print_catalog("divergences")
    assert "reverse_kl" in capsys.readouterr().out

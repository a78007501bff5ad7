"""The taking rule against an exhaustive search written from its statement."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from system.taking_rule import choose_groups


def first_feasible_set(ready, unfinished, version, groups_per_step, max_staleness):
    outstanding = [*ready.values(), *unfinished]

    def number(versions, level):
        return sum(1 for found in versions if found <= level)

    for chosen in combinations(sorted(ready), groups_per_step):
        left = [*unfinished, *(ready[group_id] for group_id in ready if group_id not in chosen)]
        limits = {
            level: max(
                (level + max_staleness - version) * groups_per_step, number(outstanding, level) - groups_per_step, 0
            )
            for level in range(-1, version + 3)
        }
        if all(number(left, level) <= limit for level, limit in limits.items()):
            return list(chosen)
    return None


@given(
    ready=st.dictionaries(st.integers(0, 30), st.integers(0, 6), max_size=8),
    unfinished=st.lists(st.integers(0, 6), max_size=5),
    version=st.integers(4, 6),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
)
def test_the_greedy_choice_is_the_first_set_in_issue_order_that_keeps_everything_trainable(
    ready, unfinished, version, groups_per_step, max_staleness
):
    arguments = (ready, unfinished, version, groups_per_step, max_staleness)
    assert choose_groups(*arguments) == first_feasible_set(*arguments)


@given(
    ready=st.dictionaries(st.integers(0, 30), st.integers(0, 9), max_size=12),
    version=st.integers(0, 9),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
)
def test_a_step_never_waits_when_nothing_is_unfinished(ready, version, groups_per_step, max_staleness):
    chosen = choose_groups(ready, [], version, groups_per_step, max_staleness)
    assert (chosen is None) == (len(ready) < groups_per_step)


def test_a_later_group_goes_ahead_while_the_older_one_still_has_time():
    assert choose_groups({1: 5, 2: 5}, [4], version=5, groups_per_step=2, max_staleness=2) == [1, 2]


def test_the_step_waits_for_an_unfinished_group_that_is_due_now():
    assert choose_groups({1: 5, 2: 5}, [3], version=5, groups_per_step=2, max_staleness=2) is None


def test_a_group_issued_again_does_not_push_an_older_one_over_its_limit():
    ready = {1: 5, 2: 5, 7: 3}
    assert choose_groups(ready, [], version=5, groups_per_step=2, max_staleness=2) == [1, 7]


def test_only_so_many_groups_of_one_version_are_left_as_the_remaining_steps_can_take():
    ready = {10: 5, 11: 5, 12: 5}
    assert choose_groups(ready, [4, 4, 4], version=5, groups_per_step=2, max_staleness=2) is None
    assert choose_groups(ready, [4, 4], version=5, groups_per_step=2, max_staleness=2) == [10, 11]

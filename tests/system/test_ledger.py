"""What the group ledger promises, case by case."""

import json

import pytest

from system.core.errors import CheckpointDamaged, ConfigError, DataError, InfrastructureError
from system.core.records import RecordError
from system.ledger import GroupLedger, LedgerLimits


def make_ledger(**changes) -> GroupLedger:
    settings = {"groups_per_step": 2, "max_staleness": 1, "deadline_s": 10.0, "grace_s": 2.0, **changes}
    return GroupLedger(LedgerLimits(**settings))


def finish(ledger, group_id, worker="w0", version=None, scored=4, zero_signal=False, now_s=0.0):
    oldest = ledger.version if version is None else version
    return ledger.submit(worker, group_id, oldest, scored, zero_signal, ledger.incarnation, now_s)


def lease_ids(ledger, room, worker="w0", now_s=0.0):
    return [ticket.group_id for ticket in ledger.lease(worker, room, now_s)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("groups_per_step", 0),
        ("max_staleness", -1),
        ("deadline_s", 0.0),
        ("deadline_s", float("nan")),
        ("attempts", 0),
        ("refill_limit", 0),
        ("min_scored", 0),
        ("steps", 0),
        ("first_group_id", -1),
        ("grace_s", -1.0),
    ],
)
def test_a_limit_under_which_no_step_could_be_filled_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        make_ledger(**{name: value})


def test_leases_follow_the_prompt_stream_and_stop_at_the_staleness_bound():
    ledger = make_ledger()
    assert lease_ids(ledger, 3) == [0, 1, 2]
    assert lease_ids(ledger, 3) == [3]
    assert lease_ids(ledger, 3) == []


def test_without_staleness_the_next_step_is_leased_only_after_the_commit():
    ledger = make_ledger(max_staleness=0)
    assert lease_ids(ledger, 9) == [0, 1]
    assert ledger.take(0) is None
    finish(ledger, 1)
    assert ledger.take(0) is None
    finish(ledger, 0)
    assert lease_ids(ledger, 9) == []
    assert ledger.take(0) == [0, 1]
    assert lease_ids(ledger, 9) == []
    ledger.commit(1)
    assert [(ticket.group_id, ticket.version) for ticket in ledger.lease("w0", 9, 0.0)] == [(2, 1), (3, 1)]


def test_nothing_is_issued_that_no_step_would_train():
    ledger = make_ledger(steps=2, max_staleness=4)
    assert lease_ids(ledger, 99) == [0, 1, 2, 3]
    for group_id in range(4):
        finish(ledger, group_id)
    ledger.take(0)
    ledger.commit(1)
    assert lease_ids(ledger, 99) == []
    ledger.take(1)
    ledger.commit(2)
    assert lease_ids(ledger, 99) == []
    assert (ledger.counts().issued, ledger.counts().trained) == (4, 4)


def test_a_group_is_accepted_once_and_a_late_twin_is_counted_and_dropped():
    ledger = make_ledger()
    lease_ids(ledger, 1)
    assert finish(ledger, 0) == "ready"
    assert finish(ledger, 0) == "late_twin"
    assert ledger.counts().late_twins == 1
    assert ledger.counts().ready == 1


def test_a_lost_workers_group_is_issued_again_under_its_id_and_its_own_copy_is_refused():
    ledger = make_ledger()
    lease_ids(ledger, 2, worker="w0")
    assert ledger.revoke("w0", 1.0) == [0, 1]
    (again,) = ledger.lease("w1", 1, 2.0)
    assert (again.group_id, again.attempt) == (0, 1)
    assert finish(ledger, 0, worker="w0") == "revoked"
    assert finish(ledger, 0, worker="w1") == "ready"
    assert finish(ledger, 0, worker="w0") == "late_twin"
    assert lease_ids(ledger, 9, worker="w1") == [1, 2, 3]
    assert ledger.counts().revoked_submissions == 1


def test_a_trained_groups_late_twin_is_still_recognised():
    ledger = make_ledger(max_staleness=0)
    lease_ids(ledger, 2)
    finish(ledger, 0), finish(ledger, 1)
    ledger.take(0)
    ledger.commit(1)
    assert finish(ledger, 0) == "late_twin"
    assert ledger.counts().trained == 2


def test_a_submission_of_another_incarnation_is_refused():
    ledger = make_ledger()
    lease_ids(ledger, 1)
    assert ledger.submit("w0", 0, 0, 4, False, incarnation=7, now_s=0.0) == "revoked"
    assert ledger.state(0) == "leased"


def test_a_group_that_was_never_issued_is_an_error_that_names_the_worker():
    with pytest.raises(RecordError, match="w0 handed in group 5"):
        finish(make_ledger(), 5)


def test_fewer_than_two_scored_trajectories_drop_the_group_and_give_its_room_back():
    ledger = make_ledger()
    lease_ids(ledger, 4)
    assert finish(ledger, 2, scored=1) == "too_few_scored"
    assert lease_ids(ledger, 9) == [4]
    assert ledger.counts().dropped == {"too_few_scored": 1}


def test_equal_rewards_are_trained_unless_the_recipe_refills_them():
    keeping, refilling = make_ledger(), make_ledger(refill_zero_signal=True)
    for ledger, verdict in ((keeping, "ready"), (refilling, "zero_signal")):
        lease_ids(ledger, 1)
        assert finish(ledger, 0, zero_signal=True) == verdict


def test_a_silent_workers_lease_expires_after_deadline_and_grace():
    ledger = make_ledger()
    lease_ids(ledger, 1, now_s=100.0)
    assert ledger.expire(111.9) == []
    assert ledger.expire(112.0) == [0]
    assert lease_ids(ledger, 1, worker="w1", now_s=112.0) == [0]


def test_a_group_that_keeps_losing_its_worker_is_dropped_as_poison():
    ledger = make_ledger(attempts=3)
    for _ in range(3):
        lease_ids(ledger, 1)
        assert ledger.state(0) == "leased"
        ledger.revoke("w0", 0.0)
    assert ledger.counts().dropped == {"poison": 1}


def test_after_its_attempts_a_group_is_dropped_with_its_last_reason():
    ledger = make_ledger(attempts=2)
    lease_ids(ledger, 1)
    ledger.revoke("w0", 0.0)
    lease_ids(ledger, 1)
    assert ledger.give_up("w0", 0, "generation_failed", "engine said no", 0.0)
    assert ledger.counts().dropped == {"generation_failed": 1}


def test_a_drained_workers_groups_use_up_no_attempt():
    ledger = make_ledger(attempts=1)
    for _ in range(5):
        lease_ids(ledger, 1)
        ledger.revoke("w0", 0.0, lost=False)
        lease_ids(ledger, 1)
        ledger.give_up("w0", 0, "cancelled", "draining", 0.0)
    assert ledger.state(0) == "waiting"
    assert ledger.counts().dropped == {}


def test_a_final_judgement_is_not_tried_again():
    ledger = make_ledger(attempts=3)
    lease_ids(ledger, 1)
    ledger.give_up("w0", 0, "too_few_scored", "scorer skipped", 0.0)
    assert ledger.counts().dropped == {"too_few_scored": 1}


def test_only_the_holder_can_give_a_lease_up():
    ledger = make_ledger()
    lease_ids(ledger, 1)
    assert not ledger.give_up("w1", 0, "generation_failed", "not mine", 0.0)
    assert ledger.state(0) == "leased"
    with pytest.raises(RecordError, match="unknown reason 'tired'"):
        ledger.give_up("w0", 0, "tired", "", 0.0)


def test_a_slow_group_has_max_staleness_steps_before_anyone_waits_for_it():
    ledger = make_ledger(max_staleness=2)
    slow = lease_ids(ledger, 1, worker="slow")
    for version in range(2):
        for group_id in lease_ids(ledger, 9):
            finish(ledger, group_id)
        assert slow[0] not in ledger.take(version)
        ledger.commit(version + 1)
    for group_id in lease_ids(ledger, 9):
        finish(ledger, group_id)
    assert ledger.counts().ready >= 2
    assert ledger.take(2) is None
    assert "must wait for the oldest unfinished ones, first of all group 0" in ledger.why_waiting(0.0)
    assert finish(ledger, 0, worker="slow", version=0) == "ready"
    assert 0 in ledger.take(2)


def test_a_group_that_lost_its_worker_counts_as_fresh_before_it_is_leased_again():
    ledger = make_ledger(max_staleness=1)
    lease_ids(ledger, 1, worker="slow", now_s=0.0)
    for group_id in lease_ids(ledger, 3):
        finish(ledger, group_id)
    ledger.take(0)
    ledger.commit(1)
    finish(ledger, *lease_ids(ledger, 1))
    assert ledger.counts().ready == 2
    assert ledger.take(1) is None
    ledger.revoke("slow", 5.0)
    assert ledger.take(1) == [3, 4]


def test_an_expired_slow_group_is_no_longer_waited_for():
    ledger = make_ledger(max_staleness=0)
    lease_ids(ledger, 1, worker="slow", now_s=0.0)
    finish(ledger, *lease_ids(ledger, 1))
    ledger.expire(12.0)
    finish(ledger, *lease_ids(ledger, 1))
    assert ledger.take(0) == [0, 1]


def test_a_group_from_a_worker_that_was_behind_is_refused_for_its_age():
    ledger = make_ledger(max_staleness=0)
    for group_id in lease_ids(ledger, 2):
        finish(ledger, group_id)
    ledger.take(0)
    ledger.commit(1)
    (group_id,) = lease_ids(ledger, 1)
    assert finish(ledger, group_id, version=0) == "too_old"
    assert ledger.counts().dropped == {"too_old": 1}


def test_a_ready_group_left_behind_by_a_jump_of_the_version_is_dropped_when_the_step_is_taken():
    ledger = make_ledger(max_staleness=1)
    for group_id in lease_ids(ledger, 4):
        finish(ledger, group_id)
    ledger.take(0)
    ledger.commit(7)
    assert ledger.take(7) is None
    assert ledger.counts().dropped == {"too_old": 2}


def test_taking_again_before_the_commit_gives_the_same_step():
    ledger = make_ledger()
    for group_id in lease_ids(ledger, 4):
        finish(ledger, group_id)
    assert ledger.take(0) == ledger.take(0) == [0, 1]
    assert ledger.commit(1) == [0, 1]
    with pytest.raises(ValueError, match="without a taken step"):
        ledger.commit(2)


def test_a_version_is_used_once():
    ledger = make_ledger(max_staleness=0)
    for group_id in lease_ids(ledger, 2):
        finish(ledger, group_id)
    ledger.take(0)
    with pytest.raises(ValueError, match="version 0 is already used"):
        ledger.commit(0)
    with pytest.raises(ValueError, match="take at version 3"):
        ledger.take(3)


def test_a_step_that_the_filter_keeps_empty_ends_in_an_error_that_says_what_and_why():
    ledger = make_ledger(refill_zero_signal=True, refill_limit=3)
    for _ in range(6):
        (group_id,) = lease_ids(ledger, 1)
        finish(ledger, group_id, zero_signal=True)
    assert lease_ids(ledger, 9) == []
    with pytest.raises(DataError, match=r"step 1 cannot be filled: 6 groups .* zero_signal 6 .*refill_limit"):
        ledger.take(0)


def test_a_step_that_failures_keep_empty_is_the_infrastructures_fault_with_the_last_cause():
    ledger = make_ledger(attempts=1, refill_limit=2)
    for _ in range(4):
        (group_id,) = lease_ids(ledger, 1)
        ledger.give_up("w0", group_id, "generation_failed", "CUDA is gone", 0.0)
    with pytest.raises(InfrastructureError, match=r"generation_failed 4 .*CUDA is gone"):
        ledger.take(0)


def test_losses_count_per_step_and_only_while_it_lacks_groups():
    ledger = make_ledger(refill_zero_signal=True, refill_limit=1, max_staleness=3)
    for step in range(4):
        finish(ledger, *lease_ids(ledger, 1), zero_signal=True)
        for _ in range(2):
            finish(ledger, *lease_ids(ledger, 1))
        for _ in range(3):
            finish(ledger, *lease_ids(ledger, 1), zero_signal=True)
        assert ledger.take(step) is not None
        ledger.commit(step + 1)
    assert ledger.counts().dropped == {"zero_signal": 16}


def test_a_restored_ledger_issues_what_was_open_and_what_came_later_again_under_the_same_ids():
    ledger = make_ledger(max_staleness=2)
    ids = lease_ids(ledger, 6)
    for group_id in (0, 1, 2):
        finish(ledger, group_id)
    finish(ledger, 4, scored=0)
    ledger.take(0)
    ledger.commit(1)
    saved = json.loads(json.dumps(ledger.snapshot()))
    lost = lease_ids(ledger, 9)
    assert ids == [0, 1, 2, 3, 4, 5]
    assert lost == [6, 7, 8]

    fresh = make_ledger(max_staleness=2)
    fresh.restore(saved, incarnation=1, version=4)
    assert (fresh.counts().leased, fresh.counts().ready, fresh.counts().trained) == (3, 0, 2)
    tickets = fresh.lease("w9", 9, 0.0)
    assert [ticket.group_id for ticket in tickets] == [2, 3, 5, 6, 7, 8]
    assert {(ticket.version, ticket.incarnation) for ticket in tickets} == {(4, 1)}
    assert fresh.counts().dropped == {"too_few_scored": 1}
    assert fresh.submit("w9", 2, 0, 4, False, incarnation=0, now_s=0.0) == "revoked"
    fresh.check_conservation()


def test_a_ledger_goes_back_while_its_run_is_alive():
    ledger = make_ledger(max_staleness=0)
    saved = ledger.snapshot()
    for group_id in lease_ids(ledger, 2):
        finish(ledger, group_id)
    ledger.take(0)
    ledger.commit(1)
    ledger.restore(saved, incarnation=1, version=2)
    assert lease_ids(ledger, 9) == [0, 1]
    assert ledger.counts().trained == 0


def test_a_used_incarnation_or_version_is_refused_when_going_back():
    ledger = make_ledger(max_staleness=0)
    for group_id in lease_ids(ledger, 2):
        finish(ledger, group_id)
    ledger.take(0)
    ledger.commit(1)
    saved = ledger.snapshot()
    with pytest.raises(ValueError, match="incarnation 0"):
        ledger.restore(saved, incarnation=0, version=2)
    with pytest.raises(ValueError, match="version 0 was used before"):
        ledger.restore(saved, incarnation=1, version=0)


@pytest.mark.parametrize(
    "damage", [{"trained": 5}, {"outstanding": [[99, 0, 0]]}, {"outstanding": None}, {"next_group_id": "x"}]
)
def test_a_damaged_snapshot_is_named_and_changes_nothing(damage):
    ledger = make_ledger()
    lease_ids(ledger, 1)
    saved = {**ledger.snapshot(), **damage}
    before = ledger.snapshot()
    with pytest.raises(CheckpointDamaged, match="ledger in the checkpoint"):
        ledger.restore(saved, incarnation=1, version=1)
    assert ledger.snapshot() == before


def test_the_end_of_a_run_accounts_for_what_was_still_open():
    ledger = make_ledger()
    lease_ids(ledger, 3)
    finish(ledger, 1)
    assert ledger.cancel() == [0, 1, 2]
    assert ledger.counts().dropped == {"cancelled": 3}
    ledger.check_conservation()


def test_a_stall_is_explained_by_who_holds_what_since_when():
    ledger = make_ledger(attempts=5)
    assert "last asked for: never" in ledger.why_waiting(3.0)
    lease_ids(ledger, 3, worker="w0", now_s=10.0)
    lease_ids(ledger, 1, worker="w1", now_s=20.0)
    ledger.revoke("w1", 30.0)
    finish(ledger, 2, now_s=31.0)
    text = ledger.why_waiting(52.0)
    assert "step 1 (version 0) needs 2 groups: 1 ready" in text
    assert "worker w0 holds 2, longest group 0 for 42 s" in text
    assert "1 wait to be issued again" in text
    assert "last asked for: w1 32 s ago" in text
    lease_ids(ledger, 1, worker="w1", now_s=52.0)
    assert "workers wait" in ledger.why_waiting(60.0)

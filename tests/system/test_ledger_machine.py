"""The ledger under any schedule of leases, results, failures, steps and returns to a checkpoint."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from system.ledger import GroupLedger, LedgerLimits

WORKERS = ("w0", "w1", "w2")
REASONS = ("zero_signal", "too_few_scored", "generation_failed", "deadline", "too_old", "poison", "cancelled")


class LedgerMachine(RuleBasedStateMachine):
    """Workers answer honestly: no token is older than its lease. ``held`` is what they believe, also when revoked."""

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 3),
        attempts=st.integers(1, 3),
        refill=st.booleans(),
        steps=st.one_of(st.none(), st.integers(1, 6)),
    )
    def start(self, groups_per_step, max_staleness, attempts, refill, steps):
        self.limits = LedgerLimits(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            deadline_s=10.0,
            attempts=attempts,
            refill_limit=1_000,
            refill_zero_signal=refill,
            steps=steps,
        )
        self.ledger = GroupLedger(self.limits)
        self.now_s = 0.0
        self.held = {}
        self.trained = []
        self.saved = None

    @rule(worker=st.sampled_from(WORKERS), room=st.integers(0, 6))
    def lease(self, worker, room):
        tickets = self.ledger.lease(worker, room, self.now_s)
        assert len(tickets) <= room
        for ticket in tickets:
            assert ticket.version == self.ledger.version
            self.held[worker, ticket.group_id] = ticket

    @precondition(lambda self: self.held)
    @rule(choice=st.randoms(use_true_random=False), scored=st.integers(0, 4), zero_signal=st.booleans())
    def submit(self, choice, scored, zero_signal):
        (worker, _), ticket = choice.choice(list(self.held.items()))
        newest = max(ticket.version, self.ledger.version)
        oldest = choice.randint(ticket.version, newest)
        before = self.ledger.state(ticket.group_id)
        verdict = self.ledger.submit(
            worker, ticket.group_id, oldest, scored, zero_signal, ticket.incarnation, self.now_s
        )
        if verdict == "ready":
            assert before == "leased"
            assert scored >= 2
        if before in ("ready", "taken"):
            assert verdict in ("late_twin", "revoked")

    @precondition(lambda self: self.held)
    @rule(choice=st.randoms(use_true_random=False), reason=st.sampled_from(REASONS))
    def give_up(self, choice, reason):
        (worker, _), ticket = choice.choice(list(self.held.items()))
        self.ledger.give_up(worker, ticket.group_id, reason, "cause", self.now_s)

    @rule(worker=st.sampled_from(WORKERS), lost=st.booleans())
    def revoke(self, worker, lost):
        self.ledger.revoke(worker, self.now_s, lost)

    @rule(seconds=st.floats(0.0, 20.0))
    def pass_time(self, seconds):
        self.now_s += seconds
        self.ledger.expire(self.now_s)

    @rule()
    def take(self):
        taken = self.ledger.take(self.ledger.version)
        if taken is not None:
            assert taken == sorted(taken)
            assert len(taken) == self.limits.groups_per_step
            for group_id in taken:
                assert 0 <= self.ledger.version - self.ledger.oldest_version(group_id) <= self.limits.max_staleness

    @precondition(lambda self: self.ledger.counts().taken)
    @rule()
    def commit(self):
        self.trained += self.ledger.commit(self.ledger.version + 1)

    @rule()
    def save(self):
        self.saved = (json.loads(json.dumps(self.ledger.snapshot())), list(self.trained))

    @precondition(lambda self: self.saved)
    @rule(in_a_new_process=st.booleans())
    def go_back(self, in_a_new_process):
        snapshot, self.trained = self.saved[0], list(self.saved[1])
        old = self.ledger
        if in_a_new_process:
            self.ledger = GroupLedger(self.limits)
        self.ledger.restore(snapshot, old.incarnation + 1, old.version + 1)
        counts = self.ledger.counts()
        assert (counts.ready, counts.taken) == (0, 0)
        assert counts.leased == counts.waiting == len(snapshot["outstanding"])

    @invariant()
    def every_group_is_accounted_for(self):
        self.ledger.check_conservation()
        counts = self.ledger.counts()
        assert counts.leased + counts.ready + counts.taken <= (
            (self.limits.max_staleness + 1) * self.limits.groups_per_step
        )
        assert counts.trained == len(self.trained)

    @invariant()
    def no_group_is_trained_twice(self):
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def nothing_finished_is_thrown_away_for_its_age(self):
        assert "too_old" not in self.ledger.counts().dropped

    def teardown(self):
        """Whatever happened: if one worker keeps finishing what it leases, steps go on."""
        if not hasattr(self, "ledger"):
            return
        for worker in WORKERS:
            self.ledger.revoke(worker, self.now_s, lost=False)
        for _ in range(3):
            if self.limits.steps is not None and self.ledger.steps_committed >= self.limits.steps:
                assert self.ledger.lease("w0", 9, self.now_s) == []
                return
            for ticket in self.ledger.lease("w0", 99, self.now_s):
                self.ledger.submit("w0", ticket.group_id, ticket.version, 4, False, ticket.incarnation, self.now_s)
            assert self.ledger.take(self.ledger.version) is not None, self.ledger.why_waiting(self.now_s)
            self.commit()
            self.every_group_is_accounted_for()


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations(range(12)),
    groups_per_step=st.sampled_from([1, 2, 3, 4]),
)
def test_the_order_of_finishing_does_not_matter_when_staleness_leaves_one_choice(order, groups_per_step):
    ledger = GroupLedger(LedgerLimits(groups_per_step=groups_per_step, max_staleness=0, deadline_s=10.0))
    trained = []
    for version in range(3):
        tickets = ledger.lease("w0", 99, 0.0)
        for position in [position for position in order if position < len(tickets)]:
            assert ledger.take(version) is None
            ticket = tickets[position]
            ledger.submit("w0", ticket.group_id, version, 4, False, 0, 0.0)
        trained.append(ledger.take(version))
        ledger.commit(version + 1)
    flat = [group_id for step in trained for group_id in step]
    assert flat == list(range(3 * groups_per_step))


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations(range(8)),
    groups_per_step=st.sampled_from([1, 2, 4]),
)
def test_with_everything_finished_a_stale_run_trains_in_issue_order_whatever_finished_first(order, groups_per_step):
    ledger = GroupLedger(
        LedgerLimits(groups_per_step=groups_per_step, max_staleness=8 // groups_per_step - 1, deadline_s=9.0)
    )
    tickets = ledger.lease("w0", 8, 0.0)
    for position in order:
        ledger.submit("w0", tickets[position].group_id, 0, 4, False, 0, 0.0)
    trained = []
    for version in range(8 // groups_per_step):
        trained += ledger.take(version)
        ledger.commit(version + 1)
    assert trained == list(range(8))

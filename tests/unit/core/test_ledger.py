"""The block ledger: every block in one state, whatever comes in which order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_core.errors import InvalidTransition, LedgerCorrupt
from pd_core.ledger import BlockLedger, LedgerReport

NUM_BLOCKS = 12
HOLDERS = st.sampled_from(["a", "b", "c"])


def test_a_fresh_ledger_is_idle_and_has_no_epoch_yet() -> None:
    ledger = BlockLedger(4, "boot")
    assert ledger.counts().is_idle
    assert (ledger.num_blocks, ledger.num_free, ledger.epoch) == (4, 4, 0)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockLedger(0, "boot")


def test_aborted_blocks_are_nobodys_until_their_quarantine_ends() -> None:
    ledger = BlockLedger(4, "boot")
    reservation = ledger.try_reserve(4)
    assert reservation is not None
    ledger.abort(reservation.epoch)
    assert ledger.try_reserve(1) is None
    assert ledger.try_hold("next", 1) is None
    ledger.end_quarantine(reservation.epoch)
    assert ledger.counts().is_idle


def test_committed_blocks_come_before_the_head_room_that_was_held_earlier() -> None:
    ledger = BlockLedger(8, "boot")
    head_room = ledger.try_hold("request", 2)
    reservation = ledger.try_reserve(3)
    assert head_room is not None
    assert reservation is not None
    assert ledger.commit(reservation.epoch, "request") == reservation.block_ids
    assert ledger.holds("request") == reservation.block_ids + head_room


def test_a_refused_reservation_uses_up_no_epoch() -> None:
    ledger = BlockLedger(2, "boot")
    assert ledger.try_reserve(3) is None
    first = ledger.try_reserve(1)
    assert first is not None
    assert first.epoch == 1


def test_shared_blocks_are_free_only_after_the_last_holder_has_left() -> None:
    ledger = BlockLedger(3, "boot")
    block_ids = ledger.try_hold("request", 3)
    assert block_ids is not None
    ledger.share("transfer", block_ids)
    ledger.release("request")
    assert ledger.num_free == 0
    ledger.release("transfer")
    assert ledger.counts().is_idle


@pytest.mark.parametrize("block_ids", [[0, 0], [3], [-1], [99], [0, 3]])
def test_blocks_that_cannot_be_shared_are_not_shared_in_part(block_ids: list[int]) -> None:
    ledger = BlockLedger(4, "boot")
    held = ledger.try_hold("request", 3)
    assert held == [0, 1, 2]
    before = ledger.report()
    with pytest.raises(InvalidTransition):
        ledger.share("transfer", block_ids)
    assert ledger.report() == before


def test_validate_sees_a_block_that_is_in_two_states() -> None:
    ledger = BlockLedger(4, "boot")
    ledger.try_hold("request", 2)
    ledger._free.append(0)
    with pytest.raises(LedgerCorrupt, match="block 0 is free and held"):
        ledger.validate()


def test_validate_sees_a_lost_block_and_a_miscounted_holder() -> None:
    lost = BlockLedger(4, "boot")
    lost._free.pop()
    with pytest.raises(LedgerCorrupt, match="no state"):
        lost.validate()
    miscounted = BlockLedger(4, "boot")
    miscounted.try_hold("request", 1)
    miscounted._num_holders[0] += 1
    with pytest.raises(LedgerCorrupt, match="miscounted"):
        miscounted.validate()


class AnyOrderOfCalls(RuleBasedStateMachine):
    """The ledger against a model that knows only which blocks each holder and each epoch has."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(NUM_BLOCKS, "boot")
        self.held: dict[str, list[int]] = {}
        self.reserved: dict[int, list[int]] = {}
        self.quarantined: dict[int, list[int]] = {}
        self.newest_epoch = 0

    def in_use(self) -> set[int]:
        owners = [*self.held.values(), *self.reserved.values(), *self.quarantined.values()]
        return {block_id for block_ids in owners for block_id in block_ids}

    @rule(holder=HOLDERS, num_blocks=st.integers(0, 5))
    def hold(self, holder: str, num_blocks: int) -> None:
        used = self.in_use()
        taken = self.ledger.try_hold(holder, num_blocks)
        if num_blocks > NUM_BLOCKS - len(used):
            assert taken is None
            return
        assert taken is not None
        assert len(taken) == num_blocks
        assert not used & set(taken)
        self.held.setdefault(holder, []).extend(taken)

    @rule(num_blocks=st.integers(0, 5))
    def reserve(self, num_blocks: int) -> None:
        used = self.in_use()
        reservation = self.ledger.try_reserve(num_blocks)
        if num_blocks > NUM_BLOCKS - len(used):
            assert reservation is None
            return
        assert reservation is not None
        assert reservation.epoch == self.newest_epoch + 1
        assert len(reservation.block_ids) == num_blocks
        assert not used & set(reservation.block_ids)
        self.newest_epoch = reservation.epoch
        self.reserved[reservation.epoch] = reservation.block_ids

    @precondition(lambda self: self.reserved)
    @rule(holder=HOLDERS, data=st.data())
    def commit(self, holder: str, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.reserved)))
        block_ids = self.ledger.commit(epoch, holder)
        assert block_ids == self.reserved.pop(epoch)
        self.held[holder] = block_ids + self.held.get(holder, [])

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.reserved)))
        self.ledger.abort(epoch)
        self.quarantined[epoch] = self.reserved.pop(epoch)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.ledger.end_quarantine(epoch)
        del self.quarantined[epoch]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.held)))
        self.ledger.release(holder)
        del self.held[holder]

    @rule(holder=HOLDERS, data=st.data())
    def share(self, holder: str, data: st.DataObject) -> None:
        theirs = {block_id for who, block_ids in self.held.items() if who != holder for block_id in block_ids}
        shareable = sorted(theirs - set(self.held.get(holder, [])))
        block_ids = data.draw(st.lists(st.sampled_from(shareable), unique=True)) if shareable else []
        self.ledger.share(holder, block_ids)
        self.held.setdefault(holder, []).extend(block_ids)

    @rule(epoch=st.integers(-1, 200), holder=st.sampled_from(["a", "b", "c", "nobody"]))
    def calls_that_make_no_sense_change_nothing(self, epoch: int, holder: str) -> None:
        before = self.ledger.report()
        free = sorted(set(range(NUM_BLOCKS)) - self.in_use())
        senseless: list[Callable[[], object]] = [
            lambda: self.ledger.share(holder, [NUM_BLOCKS]),
            lambda: self.ledger.try_hold(holder, -1),
            lambda: self.ledger.try_reserve(-1),
        ]
        if free:
            senseless += [lambda: self.ledger.share(holder, free[:1])]
        if epoch not in self.reserved:
            senseless += [lambda: self.ledger.commit(epoch, holder), lambda: self.ledger.abort(epoch)]
        if epoch not in self.quarantined:
            senseless += [lambda: self.ledger.end_quarantine(epoch)]
        if holder not in self.held:
            senseless += [lambda: self.ledger.release(holder)]
        for call in senseless:
            with pytest.raises(InvalidTransition):
                call()
        assert self.ledger.report() == before
        assert self.ledger.epoch == self.newest_epoch

    @invariant()
    def every_block_is_where_the_model_has_it(self) -> None:
        self.ledger.validate()
        counts = self.ledger.counts()
        assert counts.held == len({block_id for block_ids in self.held.values() for block_id in block_ids})
        assert counts.reserved == sum(map(len, self.reserved.values()))
        assert counts.quarantined == sum(map(len, self.quarantined.values()))
        assert counts.free + counts.held + counts.reserved + counts.quarantined == counts.total == NUM_BLOCKS
        for holder in ("a", "b", "c"):
            assert self.ledger.holds(holder) == self.held.get(holder, [])
        assert self.ledger.report() == LedgerReport(
            incarnation="boot",
            counts=counts,
            holders={holder: len(block_ids) for holder, block_ids in self.held.items()},
            reservations={str(epoch): len(block_ids) for epoch, block_ids in self.reserved.items()},
            quarantined={str(epoch): len(block_ids) for epoch, block_ids in self.quarantined.items()},
        )

    def teardown(self) -> None:
        """Whatever happened, it can be brought to an end, and then no block is missing."""
        for epoch in sorted(self.reserved):
            self.ledger.abort(epoch)
            self.ledger.end_quarantine(epoch)
        for epoch in sorted(self.quarantined):
            self.ledger.end_quarantine(epoch)
        for holder in sorted(self.held):
            self.ledger.release(holder)
        self.ledger.validate()
        assert self.ledger.counts().is_idle


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

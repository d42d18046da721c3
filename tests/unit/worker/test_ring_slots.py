"""Slots of a ring under every order of loans, copies, cancellations and returns; copies end when the test says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_core.errors import InvalidTransition
from pd_worker.ring_slots import Loan, RingSlots, SlotState


def test_a_block_on_its_way_out_has_its_slot_from_the_copy_until_its_transport_is_done() -> None:
    ring = RingSlots(1)
    [loan] = ring.ask(1, [70])
    assert (loan, ring.num_free) == (Loan(1, [0]), 0)
    ring.copy_began([0])
    assert ring.busy() == {70: 1}
    assert ring.copy_ended([0]) == []
    assert (ring.state(0), ring.busy()) == (SlotState.LENT, {})
    assert ring.ask(2, [71]) == []
    assert ring.give_back([0]) == [Loan(2, [0])]
    assert ring.block_of(0) == 71


def test_a_slot_given_back_in_mid_copy_is_nobodys_until_the_copy_has_ended() -> None:
    ring = RingSlots(1)
    ring.ask(1, [70])
    ring.copy_began([0])
    assert ring.ask(2, [71]) == []
    assert ring.give_back([0]) == []
    assert ring.busy() == {70: 1}, "the device is still inside block 70"
    assert ring.copy_ended([0]) == [Loan(2, [0])]
    assert ring.busy() == {}


def test_whoever_asks_for_much_is_not_passed_by_those_who_ask_for_little() -> None:
    ring = RingSlots(4)
    [first] = ring.ask(1, [1, 2, 3])
    assert ring.ask(2, [4, 5]) == []
    assert ring.ask(3, [6]) == [], "one slot is free, but the second comes before"
    loans = ring.give_back(first.slots)
    assert [(loan.borrower, len(loan.slots)) for loan in loans] == [(2, 2), (3, 1)]


def test_when_the_first_in_line_gives_up_the_next_has_its_turn_at_once() -> None:
    ring = RingSlots(2)
    ring.ask(1, [1])
    assert ring.ask(2, [2, 3]) == []
    assert ring.ask(3, [4]) == []
    assert [loan.borrower for loan in ring.withdraw(2)] == [3]
    with pytest.raises(InvalidTransition, match="borrower 2 does not wait"):
        ring.withdraw(2)


def test_a_block_that_is_shown_twice_is_busy_until_both_copies_have_ended() -> None:
    ring = RingSlots(2)
    ring.ask(1, [7])
    ring.ask(2, [7])
    ring.copy_began([0])
    ring.copy_began([1])
    ring.copy_ended([1])
    assert ring.busy() == {7: 1}


@pytest.mark.parametrize("num_slots", [0, 1, 5, 6])
def test_more_slots_than_there_are_can_never_be_had(num_slots: int) -> None:
    if num_slots == 0:
        with pytest.raises(InvalidTransition, match="a ring of 0 slots"):
            RingSlots(0)
        return
    ring = RingSlots(num_slots)
    for wrong in ([], range(num_slots + 1)):
        with pytest.raises(InvalidTransition, match=f"of {num_slots} slots"):
            ring.ask(1, wrong)
    assert ring.ask(1, range(num_slots)) == [Loan(1, list(range(num_slots)))]


def test_what_the_table_does_not_have_raises_and_changes_nothing() -> None:
    ring = RingSlots(3)
    ring.ask(1, [10, 11])
    ring.copy_began([0])
    for wrong in (
        lambda: ring.copy_began([1, 0]),
        lambda: ring.copy_began([2]),
        lambda: ring.copy_ended([1]),
        lambda: ring.give_back([1, 2]),
        lambda: ring.give_back([1, 1]),
        lambda: ring.block_of(2),
    ):
        with pytest.raises(InvalidTransition):
            wrong()
    assert [ring.state(slot) for slot in range(3)] == [SlotState.COPYING, SlotState.LENT, SlotState.FREE]
    ring.ask(2, [12, 13])
    with pytest.raises(InvalidTransition, match="waits already"):
        ring.ask(2, [14])
    ring.validate()


class RingOrders(RuleBasedStateMachine):
    """A device whose copies end when the test says, borrowers in both directions, and what must hold all the time.

    lent, copying, left: slots as the model has them; a slot is in one of the three, or free
    """

    def __init__(self) -> None:
        super().__init__()
        self.ring = RingSlots(1)
        self.asked: dict[int, list[int]] = {}
        self.lent: dict[int, int] = {}
        self.copying: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.last_borrower = 0
        self.last_block = 0

    @precondition(lambda self: not self.last_borrower)
    @rule(num_slots=st.integers(1, 6))
    def size(self, num_slots: int) -> None:
        self.ring = RingSlots(num_slots)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        num = data.draw(st.integers(1, self.ring.num_slots))
        self.last_borrower += 1
        blocks = list(range(self.last_block, self.last_block + num))
        self.last_block += num
        self.asked[self.last_borrower] = blocks
        self.take(self.ring.ask(self.last_borrower, blocks))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        borrower = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[borrower]
        self.take(self.ring.withdraw(borrower))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        for slot in self.draw(data, self.lent):
            self.ring.copy_began([slot])
            self.copying[slot] = self.lent.pop(slot)

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def end_copies_that_are_waited_for(self, data: st.DataObject) -> None:
        slots = self.draw(data, self.copying)
        for slot in slots:
            self.lent[slot] = self.copying.pop(slot)
        self.take(self.ring.copy_ended(slots))

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def end_copies_that_were_left(self, data: st.DataObject) -> None:
        slots = self.draw(data, self.left)
        for slot in slots:
            del self.left[slot]
        self.take(self.ring.copy_ended(slots))

    @precondition(lambda self: self.lent or self.copying)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots = self.draw(data, {**self.lent, **self.copying})
        for slot in slots:
            if slot in self.copying:
                self.left[slot] = self.copying.pop(slot)
            else:
                del self.lent[slot]
        self.take(self.ring.give_back(slots))

    def draw(self, data: st.DataObject, among: dict[int, int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(among)), min_size=1, unique=True))

    def take(self, loans: list[Loan]) -> None:
        for loan in loans:
            first = next(iter(self.asked))
            assert loan.borrower == first, "slots are lent in the order in which they were asked for"
            blocks = self.asked.pop(first)
            assert len(loan.slots) == len(blocks)
            for slot, block in zip(loan.slots, blocks, strict=True):
                assert slot not in self.lent | self.copying | self.left, "a slot is lent that somebody is inside"
                self.lent[slot] = block

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        self.ring.validate()
        num_taken = len(self.lent) + len(self.copying) + len(self.left)
        assert self.ring.num_free == self.ring.num_slots - num_taken
        assert self.ring.num_waiting == len(self.asked)

    @invariant()
    def the_device_is_in_the_blocks_of_running_copies_and_in_no_others(self) -> None:
        assert self.ring.busy() == Counter([*self.copying.values(), *self.left.values()])

    @invariant()
    def slots_keep_their_blocks(self) -> None:
        for slot, block in (self.lent | self.copying | self.left).items():
            assert self.ring.block_of(slot) == block

    def teardown(self) -> None:
        """Whatever happened, everybody who still waits has its turn when the others are done."""
        while self.asked or self.lent or self.copying or self.left:
            for slot in list(self.copying):
                self.left[slot] = self.copying.pop(slot)
                self.take(self.ring.give_back([slot]))
            for slot in list(self.left):
                del self.left[slot]
                self.take(self.ring.copy_ended([slot]))
            for slot in list(self.lent):
                del self.lent[slot]
                self.take(self.ring.give_back([slot]))
        assert self.ring.num_free == self.ring.num_slots


TestRingOrders = RingOrders.TestCase
TestRingOrders.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 8), st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_nobody_who_asks_for_what_the_ring_has_waits_for_ever(num_slots: int, wanted: list[int]) -> None:
    ring = RingSlots(num_slots)
    open_loans: list[Loan] = []
    for borrower, num in enumerate(wanted):
        open_loans += ring.ask(borrower, range(min(num, num_slots)))
    served = []
    while open_loans:
        loan = open_loans.pop()
        served.append(loan.borrower)
        open_loans += ring.give_back(loan.slots)
    assert sorted(served) == list(range(len(wanted)))
    assert (ring.num_free, ring.num_waiting) == (num_slots, 0)

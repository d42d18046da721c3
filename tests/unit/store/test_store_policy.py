"""What is to go: never a parent before its child, never what is pinned, and the right one of those that may."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_store.policy import FEWEST_GHOSTS, ForestPolicy, HitDensityPolicy, LruPolicy
from pd_core.errors import InvalidTransition, LedgerCorrupt

ROOT = b"r" * 16
POLICIES = [LruPolicy, HitDensityPolicy]


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def add_prefix(policy: ForestPolicy, numbers: list[int], now_s: float) -> list[bytes]:
    """The blocks of one sequence, those that are there already left out."""
    names = [name_of(number) for number in numbers]
    for position, name in enumerate(names):
        if name not in policy:
            policy.add(name, names[position - 1] if position else ROOT, position, now_s)
    return names


def evict(policy: ForestPolicy, num_blocks: int) -> list[bytes]:
    gone = policy.victims(num_blocks)
    for name in gone:
        policy.remove(name)
    return gone


# both


@pytest.mark.parametrize("make", POLICIES)
def test_a_prefix_goes_from_its_end(make: type[ForestPolicy]) -> None:
    policy = make()
    names = add_prefix(policy, [1, 2, 3, 4], 0.0)
    assert policy.victims(3) == [names[3], names[2], names[1]]
    assert policy.victims(99) == names[::-1]
    assert len(policy) == 4


@pytest.mark.parametrize("make", POLICIES)
def test_a_pinned_block_and_all_before_it_stay_until_the_last_pin_is_gone(make: type[ForestPolicy]) -> None:
    policy = make()
    names = add_prefix(policy, [1, 2, 3, 4], 0.0)
    policy.pin(names[1])
    policy.pin(names[1])
    assert policy.victims(99) == [names[3], names[2]]
    evict(policy, 99)
    assert policy.victims(99) == []
    policy.unpin(names[1])
    assert policy.victims(99) == []
    policy.unpin(names[1])
    assert policy.victims(99) == [names[1], names[0]]


@pytest.mark.parametrize("make", POLICIES)
def test_a_shared_front_goes_after_the_last_of_those_who_share_it(make: type[ForestPolicy]) -> None:
    policy = make()
    add_prefix(policy, [1, 2, 30], 0.0)
    add_prefix(policy, [1, 2, 40], 100.0)
    assert policy.victims(99) == [name_of(number) for number in (30, 40, 2, 1)]


@pytest.mark.parametrize("make", POLICIES)
def test_the_oldest_goes_first_as_long_as_nothing_has_ever_returned(make: type[ForestPolicy]) -> None:
    policy = make()
    for number in range(5):
        add_prefix(policy, [10 * number, 10 * number + 1], 7.0 * number)
    oldest_first = [name_of(10 * number + place) for number in range(5) for place in (1, 0)]
    assert policy.victims(99) == oldest_first


@pytest.mark.parametrize("make", POLICIES)
def test_a_corrupt_block_takes_along_what_continues_it_pinned_or_not(make: type[ForestPolicy]) -> None:
    policy = make()
    add_prefix(policy, [1, 2, 3, 4], 0.0)
    add_prefix(policy, [1, 2, 5], 0.0)
    policy.pin(name_of(4))
    gone = policy.remove_family(name_of(2))
    assert sorted(gone) == [name_of(number) for number in (2, 3, 4, 5)]
    assert gone.index(name_of(4)) < gone.index(name_of(3)) < gone.index(name_of(2))
    assert policy.victims(99) == [name_of(1)]
    policy.validate()


@pytest.mark.parametrize("make", POLICIES)
def test_what_makes_no_sense_is_refused_and_changes_nothing(make: type[ForestPolicy]) -> None:
    policy = make()
    names = add_prefix(policy, [1, 2, 3], 0.0)
    wrong = [
        lambda: policy.add(names[1], names[0], 1, 1.0),
        lambda: policy.add(b"n" * 16, b"unknown" * 2, 1, 1.0),
        lambda: policy.add(b"n" * 16, names[2], 2, 1.0),
        lambda: policy.add(b"n" * 16, names[2], 4, 1.0),
        lambda: policy.add(b"n" * 16, ROOT, -1, 1.0),
        lambda: policy.touch(b"n" * 16, 1.0),
        lambda: policy.pin(b"n" * 16),
        lambda: policy.unpin(b"n" * 16),
        lambda: policy.unpin(names[2]),
        lambda: policy.remove(b"n" * 16),
        lambda: policy.remove(names[1]),
        lambda: policy.remove_family(b"n" * 16),
        lambda: policy.forget(names[2]),
    ]
    for call in wrong:
        with pytest.raises(InvalidTransition):
            call()
        policy.validate()
        assert policy.victims(99) == names[::-1]


@pytest.mark.parametrize("make", POLICIES)
def test_memory_stays_with_the_blocks_however_much_happens(make: type[ForestPolicy]) -> None:
    policy = make()

    def churn(first: int, num_rounds: int) -> None:
        for number in range(first, first + num_rounds):
            add_prefix(policy, [3 * number, 3 * number + 1, 3 * number + 2], float(number))
            policy.touch(name_of(3 * number + 1), number + 2.0)
            policy.pin(name_of(3 * number + 2))
            policy.unpin(name_of(3 * number + 2))
            evict(policy, len(policy) - 50)

    churn(0, 2 * FEWEST_GHOSTS)
    tracemalloc.start()
    churn(2 * FEWEST_GHOSTS, FEWEST_GHOSTS)
    before, _ = tracemalloc.get_traced_memory()
    churn(3 * FEWEST_GHOSTS, 2 * FEWEST_GHOSTS)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000


def test_the_forest_knows_when_it_is_broken() -> None:
    policy = LruPolicy()
    add_prefix(policy, [1, 2, 3], 0.0)
    policy.validate()
    policy._forest.find(name_of(2)).num_children = 0
    with pytest.raises(LedgerCorrupt):
        policy.validate()


# LRU


def test_lru_counts_a_use_for_all_before_it() -> None:
    policy = LruPolicy()
    add_prefix(policy, [1, 2, 3], 0.0)
    add_prefix(policy, [7, 8], 0.0)
    policy.touch(name_of(2), 0.0)
    assert policy.victims(99) == [name_of(number) for number in (3, 8, 7, 2, 1)]


def test_lru_remembers_the_use_of_a_block_that_was_dropped_as_corrupt() -> None:
    policy = LruPolicy()
    add_prefix(policy, [1, 2], 0.0)
    add_prefix(policy, [7], 0.0)
    policy.touch(name_of(2), 0.0)
    policy.remove(name_of(2))
    assert policy.victims(99) == [name_of(7), name_of(1)]


# hit density


def visit(policy: HitDensityPolicy, numbers: list[int], now_s: float) -> None:
    """A request: what is there of its prefix is used, the rest is cached."""
    names = [name_of(number) for number in numbers]
    cached = [name for name in names if name in policy]
    if cached:
        policy.touch(cached[-1], now_s)
    add_prefix(policy, numbers, now_s)


def taught(block_cost: float = 0.0) -> HitDensityPolicy:
    """It has seen that every second session comes back after about a minute, once, and the others never."""
    policy = HitDensityPolicy(lambda position: 1.0 + block_cost * position)
    events = [(10.0 * session, session) for session in range(400)]
    events += [(10.0 * session + 55 + session % 10, session) for session in range(0, 400, 2)]
    for now_s, session in sorted(events):
        visit(policy, [1000 + session], now_s)
        evict(policy, len(policy) - 60)
    evict(policy, len(policy))
    return policy


def test_who_is_about_to_return_is_kept_before_who_has_just_left() -> None:
    """LRU would let the one at 50 s go before the newcomer."""
    policy, now_s = taught(), 10_000.0
    for number, age_s in ((1, 0.0), (2, 40.0), (3, 300.0)):
        policy.add(name_of(number), ROOT, 0, now_s - age_s)
    policy.add(name_of(4), ROOT, 0, now_s)
    assert policy.victims(4)[0] == name_of(3)
    assert policy.victims(4)[-1] == name_of(2)


def test_a_leaf_changes_its_place_as_it_gets_older() -> None:
    policy, now_s = taught(), 10_000.0
    policy.add(name_of(1), ROOT, 0, now_s)
    policy.add(name_of(2), ROOT, 0, now_s + 45.0)
    assert policy.victims(1) == [name_of(2)]  # 1 is about to return
    policy.add(name_of(3), ROOT, 0, now_s + 130.0)
    assert policy.victims(3)[0] == name_of(1)  # it has not


def test_of_two_that_are_worth_the_same_the_one_that_is_cheaper_to_compute_goes() -> None:
    policy, now_s = taught(block_cost=0.1), 10_000.0
    add_prefix(policy, list(range(10, 20)), now_s)
    policy.add(name_of(1), ROOT, 0, now_s + 0.1)
    assert policy.victims(1) == [name_of(1)]
    policy = taught(block_cost=0.0)
    add_prefix(policy, list(range(10, 20)), now_s)
    policy.add(name_of(1), ROOT, 0, now_s + 0.1)
    assert policy.victims(1) == [name_of(19)]


def test_what_often_returned_stays_before_what_was_used_once() -> None:
    policy = HitDensityPolicy()
    for round_number in range(200):
        now_s = 10.0 * round_number
        visit(policy, [1], now_s)
        visit(policy, [1000 + round_number], now_s + 1.0)
    assert name_of(1) not in policy.victims(len(policy) - 1)


def test_a_block_that_went_and_comes_back_is_known_again() -> None:
    """Even one that never stays long enough to be hit is learnt from: else a small store would never learn."""
    policy = HitDensityPolicy()
    for round_number in range(300):
        visit(policy, [5], 10.0 * round_number)
        evict(policy, 1)
        visit(policy, [1000 + round_number], 10.0 * round_number + 1.0)
        evict(policy, 1)
    policy.add(name_of(5), ROOT, 0, 3000.0)
    policy.add(name_of(6), ROOT, 0, 3000.0)
    assert policy.victims(2) == [name_of(6), name_of(5)]
    policy.remove(name_of(5))
    policy.forget(name_of(5))
    policy.add(name_of(5), ROOT, 0, 3000.0)
    policy.add(name_of(7), ROOT, 0, 3000.5)
    assert policy.victims(2) == [name_of(6), name_of(5)]  # nothing tells 5 from 6 but who came first


def test_touching_every_block_of_a_prefix_is_one_use_of_it() -> None:
    """Two policies see the same requests, one of them block by block: they choose the same."""
    one, each = HitDensityPolicy(), HitDensityPolicy()
    for round_number in range(120):
        now_s, numbers = 30.0 * round_number, [10 * (round_number % 9) + place for place in range(4)]
        for policy in (one, each):
            names = add_prefix(policy, numbers, now_s)
            for name in names if policy is each else names[-1:]:
                policy.touch(name, now_s)
        assert one.victims(99) == each.victims(99)
        evict(one, len(one) - 20)
        evict(each, len(each) - 20)


# whatever happens


class Model:
    """One cached block as the model has it. `used` is of the block or of what continues it."""

    def __init__(self, name: bytes, parent: Model | None) -> None:
        self.name = name
        self.parent = parent
        self.position = parent.position + 1 if parent else 0
        self.num_pins = 0
        self.used = 0

    def line(self) -> list[Model]:
        return [self, *(self.parent.line() if self.parent else [])]


class AnyOrder(RuleBasedStateMachine):
    """Random calls against a list that is searched through for every answer."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make()
        self.blocks: list[Model] = []
        self.num_uses = 0
        self.num_names = 0
        self.now_s = 0.0

    def make(self) -> ForestPolicy:
        return LruPolicy()

    def use(self, block: Model) -> None:
        self.num_uses += 1
        for member in block.line():
            member.used = self.num_uses

    def may_go(self, kept: list[Model]) -> list[Model]:
        parents = {id(block.parent) for block in kept}
        return [block for block in kept if id(block) not in parents and not block.num_pins]

    @rule(after=st.integers(0, 30), step_s=st.sampled_from([0.0, 0.5, 3.0, 100.0]), is_first=st.booleans())
    def add(self, after: int, step_s: float, is_first: bool) -> None:
        self.now_s += step_s
        parent = None if is_first or not self.blocks else self.blocks[after % len(self.blocks)]
        self.num_names += 1
        block = Model(name_of(self.num_names), parent)
        self.blocks.append(block)
        self.use(block)
        self.policy.add(block.name, parent.name if parent else ROOT, block.position, self.now_s)

    @precondition(lambda self: self.blocks)
    @rule(at=st.integers(0, 30), step_s=st.sampled_from([0.0, 2.0, 50.0]))
    def touch(self, at: int, step_s: float) -> None:
        self.now_s += step_s
        block = self.blocks[at % len(self.blocks)]
        self.use(block)
        self.policy.touch(block.name, self.now_s)

    @precondition(lambda self: self.blocks)
    @rule(at=st.integers(0, 30))
    def pin(self, at: int) -> None:
        block = self.blocks[at % len(self.blocks)]
        block.num_pins += 1
        self.policy.pin(block.name)

    @precondition(lambda self: any(block.num_pins for block in self.blocks))
    @rule(at=st.integers(0, 30))
    def unpin(self, at: int) -> None:
        pinned = [block for block in self.blocks if block.num_pins]
        block = pinned[at % len(pinned)]
        block.num_pins -= 1
        self.policy.unpin(block.name)

    @precondition(lambda self: self.blocks)
    @rule(at=st.integers(0, 30))
    def remove_family(self, at: int) -> None:
        top = self.blocks[at % len(self.blocks)]
        family = [block for block in self.blocks if top in block.line()]
        assert sorted(self.policy.remove_family(top.name)) == sorted(block.name for block in family)
        self.blocks = [block for block in self.blocks if block not in family]

    @rule(num_blocks=st.integers(0, 12))
    def evict(self, num_blocks: int) -> None:
        names = self.policy.victims(num_blocks)
        assert names == self.policy.victims(num_blocks)
        kept = list(self.blocks)
        for name in names:
            going = self.may_go(kept)
            assert name in {block.name for block in going}
            self.check_choice(name, going)
            kept = [block for block in kept if block.name != name]
        assert len(names) == num_blocks or not self.may_go(kept)
        for name in names:
            self.policy.remove(name)
        self.blocks = kept

    def check_choice(self, name: bytes, going: list[Model]) -> None:
        assert name == min(going, key=lambda block: (block.used, -block.position)).name

    @invariant()
    def agrees(self) -> None:
        self.policy.validate()
        assert len(self.policy) == len(self.blocks)
        assert all(block.name in self.policy for block in self.blocks)


class AnyOrderByDensity(AnyOrder):
    """Which of them goes is another matter; that it may go is not."""

    def make(self) -> ForestPolicy:
        return HitDensityPolicy()

    def check_choice(self, name: bytes, going: list[Model]) -> None:
        pass


TestLruInAnyOrder = AnyOrder.TestCase
TestHitDensityInAnyOrder = AnyOrderByDensity.TestCase
TestLruInAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)
TestHitDensityInAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)

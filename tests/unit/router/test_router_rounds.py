"""What several runs bring is handed to one reader, in rounds of the loop and outside its task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from pd_core.errors import Cancelled, KvrelayError, WorkerLost
from router.choices import Choices
from router.rounds import Rounds
from router.unread import TokenEvent, UnreadTokens

News = Sequence[tuple[int, list[TokenEvent]]]


class Run:
    """A run as its reader sees it: tokens, then an end, which is good or an error."""

    def __init__(self) -> None:
        self.timeline = SimpleNamespace(ended_s=None)
        self._unread = UnreadTokens(0)
        self._error: KvrelayError | None = None
        self._on_news: Callable[[], None] = lambda: None

    def watch(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def bring(self, *tokens: int) -> None:
        for token in tokens:
            self._unread.add(token, None, 0.0)
            self._on_news()

    def end(self, error: KvrelayError | None = None) -> None:
        self.timeline.ended_s, self._error = 1.0, error
        self._on_news()

    def leave(self) -> None:
        if self.timeline.ended_s is None:
            self.end(Cancelled("the client has left"))

    def take_events(self) -> list[TokenEvent] | None:
        if events := self._unread.take():
            return events
        if self._error is not None:
            raise self._error
        return None if self.timeline.ended_s is None else []


class Reader:
    """Writes down every call; wants more until it has had `num_wanted` tokens in all."""

    def __init__(self, num_wanted: int = 1000) -> None:
        self.num_wanted = num_wanted
        self.calls: list[list[tuple[int, list[int]]]] = []

    def take(self, news: News) -> bool:
        self.calls.append([(choice, [event.token for event in events]) for choice, events in news])
        return sum(len(tokens) for call in self.calls for _, tokens in call) < self.num_wanted


def choices_of(*runs: Run) -> Choices:
    return Choices(runs, Rounds())  # type: ignore[arg-type]


async def reading(choices: Choices, reader: Reader) -> asyncio.Task[None]:
    """A task that has taken what was there, and waits."""
    task = asyncio.create_task(choices.for_each(reader.take))
    await asyncio.sleep(0)
    return task


async def a_round() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_all_that_comes_before_the_loop_comes_round_is_one_call() -> None:
    one, two = Run(), Run()
    reader = Reader()
    task = await reading(choices_of(one, two), reader)
    one.bring(1)
    two.bring(7)
    one.bring(2, 3)
    assert reader.calls == []
    await a_round()
    assert reader.calls == [[(0, [1, 2, 3]), (1, [7])]]
    task.cancel()


async def test_what_came_before_anybody_reads_is_handed_over_at_once() -> None:
    run, reader = Run(), Reader(num_wanted=2)
    choices = choices_of(run)
    run.bring(1, 2)
    await choices.for_each(reader.take)
    assert reader.calls == [[(0, [1, 2])]]


async def test_a_reader_that_wants_no_more_for_now_is_called_again_only_when_it_asks() -> None:
    run, reader = Run(), Reader(num_wanted=1)
    choices = choices_of(run)
    task = await reading(choices, reader)
    run.bring(1)
    await asyncio.wait_for(task, 1)
    run.bring(2)
    run.bring(3)
    await a_round()
    assert reader.calls == [[(0, [1])]]
    await choices.for_each(reader.take)
    assert reader.calls == [[(0, [1])], [(0, [2, 3])]]


async def test_an_error_that_comes_together_with_the_last_token_is_raised_behind_it() -> None:
    run, reader = Run(), Reader()
    task = await reading(choices_of(run, Run()), reader)
    run.bring(1)
    run.end(WorkerLost("gone"))
    with pytest.raises(WorkerLost, match="gone"):
        await asyncio.wait_for(task, 1)
    assert reader.calls == [[(0, [1])]]


async def test_an_error_is_raised_though_the_reader_wanted_no_more_when_it_came() -> None:
    run, reader = Run(), Reader(num_wanted=1)
    choices = choices_of(run)
    run.bring(1)
    run.end(WorkerLost("gone"))
    await choices.for_each(reader.take)
    with pytest.raises(WorkerLost, match="gone"):
        await asyncio.wait_for(choices.for_each(reader.take), 1)


async def test_a_good_end_of_one_choice_does_not_end_the_reading_of_the_others() -> None:
    one, two = Run(), Run()
    reader = Reader(num_wanted=2)
    task = await reading(choices_of(one, two), reader)
    one.bring(1)
    one.end()
    await a_round()
    assert not task.done()
    two.bring(2)
    await asyncio.wait_for(task, 1)


async def test_who_leaves_is_told_so_in_the_reading_task() -> None:
    choices = choices_of(Run(), Run())
    task = await reading(choices, Reader())
    choices.leave()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(task, 1)


async def test_a_fault_in_a_reader_is_its_own_and_the_round_goes_on() -> None:
    def broken(_: News) -> bool:
        raise ZeroDivisionError

    rounds, one, two, reader = Rounds(), Run(), Run(), Reader(num_wanted=1)
    first = asyncio.create_task(Choices([one], rounds).for_each(broken))  # type: ignore[list-item]
    second = asyncio.create_task(Choices([two], rounds).for_each(reader.take))  # type: ignore[list-item]
    await asyncio.sleep(0)
    one.bring(1)
    two.bring(2)
    await asyncio.wait_for(second, 1)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(first, 1)


async def test_a_reader_that_was_cancelled_is_not_called_any_more() -> None:
    run, reader = Run(), Reader()
    task = await reading(choices_of(run), reader)
    run.bring(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await a_round()
    assert reader.calls == []


async def test_one_callback_of_the_loop_serves_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, called, num_scheduled = Rounds(), [], 0
    loop = asyncio.get_running_loop()
    usual = loop.call_soon

    def counted(*args: object, **kwargs: object) -> asyncio.Handle:
        nonlocal num_scheduled
        num_scheduled += 1
        return usual(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon", counted)
    for number in range(16):
        rounds.soon(lambda number=number: called.append(number))  # type: ignore[misc]
    assert num_scheduled == 1
    await a_round()
    assert called == list(range(16))

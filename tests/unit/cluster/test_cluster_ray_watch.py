"""A vital process that ends is noticed, and no process of ours is lost sight of."""

from __future__ import annotations

import queue
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from cluster.orphans import adopt_orphans, kill_all_descendants
from cluster.processes import list_descendants
from cluster.ray_watch import RayStartWatch, RayWatch
from pd_core.errors import Unavailable


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    while psutil.Process(process.pid).name() != "sleep":
        pass  # until it has become that
    yield process
    process.kill()
    process.wait()


def test_a_vital_process_that_ends_is_named_at_once(child):
    lost: queue.Queue[str] = queue.Queue()
    watch = RayWatch(lost.put, ("sleep",))
    child.kill()
    assert lost.get(timeout=2.0) == "sleep"
    watch.close()


def test_after_its_close_a_watch_says_nothing(child):
    lost: queue.Queue[str] = queue.Queue()
    watch = RayWatch(lost.put, ("sleep",))
    watch.close()
    child.kill()
    child.wait()
    assert lost.empty()


def test_a_vital_process_that_is_not_there_is_named():
    with pytest.raises(Unavailable, match="Ray's no-such is not running"):
        RayWatch(lambda _name: None, ("no-such",))


def test_a_process_that_came_and_went_while_ray_starts_is_named_also_before_anybody_waits_for_it(child):
    watch = RayStartWatch(("sleep",))
    assert watch.find_dead() is None
    assert watch.find_dead() is None
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert watch.find_dead() == "sleep"
    child.wait()
    assert watch.find_dead() == "sleep"


def test_one_that_has_not_come_yet_is_waited_for():
    assert RayStartWatch(("no-such",)).find_dead() is None


def test_children_of_a_dead_child_are_killed_too():
    adopt_orphans(wanted=True)
    try:
        parent = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        parent.stdout.close()
        parent.kill()
        parent.wait()
        assert orphan.is_running()
        ours = {process.pid for process in list_descendants()}
        assert orphan.pid in ours
        if ours == {orphan.pid}:  # not beside a Ray that other tests use
            assert kill_all_descendants() == []
            assert not orphan.is_running()
    finally:
        adopt_orphans(wanted=False)

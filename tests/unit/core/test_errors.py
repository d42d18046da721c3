"""Errors travel between processes as themselves."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from pd_core.errors import ErrorInfo, KvrelayError, from_wire


def all_kinds(root: type[KvrelayError] = KvrelayError) -> list[type[KvrelayError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in all_kinds(child))]


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_an_error_pickles_and_crosses_the_wire_as_its_own_class_with_all_it_says(kind: type[KvrelayError]) -> None:
    error = kind("what is wrong", param="max_tokens", retry_after_s=1.5)
    over_the_wire = from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_wire()), type=ErrorInfo))
    for copy in (pickle.loads(pickle.dumps(error)), over_the_wire):
        assert type(copy) is kind
        assert (copy.message, copy.param, copy.retry_after_s) == ("what is wrong", "max_tokens", 1.5)
        assert str(copy) == "what is wrong"


def test_a_kind_that_is_defined_after_the_import_comes_back_as_itself() -> None:
    kind = type("DefinedLate", (KvrelayError,), {"code": "late"})
    assert type(from_wire(kind("what is wrong").to_wire())) is kind


def test_an_error_of_a_newer_version_is_still_an_error() -> None:
    error = from_wire(ErrorInfo("InventedLater", "what is wrong"))
    assert type(error) is KvrelayError
    assert error.http_status == 500


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_a_type_and_a_code_for_clients(kind: type[KvrelayError]) -> None:
    assert 400 <= kind.http_status <= 599
    assert kind.error_type
    assert kind.code


def test_no_two_classes_of_the_family_have_one_name() -> None:
    names = [kind.__name__ for kind in all_kinds()]
    assert len(names) == len(set(names))

import dataclasses
import errno
import hashlib
import os
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxies.core import canon

settings.register_profile("still", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("still")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    kind: Literal["bolt", "nut"]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    weight: float
    count: int
    ready: bool
    label: str | None
    part: Part
    pair: tuple[int, str]
    table: dict[str, float]


WHOLE = Whole(
    weight=1.5,
    count=2,
    ready=True,
    label=None,
    part=Part(kind="nut", sizes=(1, 2)),
    pair=(3, "x"),
    table={"a": 0.5},
)


@pytest.mark.parametrize(
    "value, text",
    [
        ({"b": 1, "a": None, "B": [True, False]}, '{"B":[true,false],"a":null,"b":1}'),
        ([1, 1.0, -0.0, 0.1, 1e-3, 3e-4, 123456789.0], "[1,1.0,-0.0,0.1,0.001,0.0003,123456789.0]"),
        (
            [1e16, 1e22, 5e-324, 1.7976931348623157e308, 2**64],
            "[1e+16,1e+22,5e-324,1.7976931348623157e+308,18446744073709551616]",
        ),
        ([0.1 + 0.2, 2**-24], "[0.30000000000000004,5.960464477539063e-08]"),
        ('é\n"\\\t\u2028', '"é\\n\\"\\\\\\t\u2028"'),
        ({}, "{}"),
        (((), [[]]), "[[],[[]]]"),
        (WHOLE.part, '{"kind":"nut","sizes":[1,2]}'),
        (
            dataclasses.replace(WHOLE, part=Part(kind="bolt", sizes=())),
            '{"count":2,"label":null,"pair":[3,"x"],"part":{"kind":"bolt","sizes":[]},"ready":true,"table":{"a":0.5},"weight":1.5}',
        ),
    ],
)
def test_the_canonical_form_is_pinned(value, text):
    assert canon.canonical(value) == text


def test_the_id_is_the_sha256_of_the_text():
    assert (
        canon.content_id({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )
    assert canon.content_id(WHOLE) == hashlib.sha256(canon.canonical(WHOLE).encode()).hexdigest()
    assert len(canon.content_id([])) == canon.ID_LENGTH


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_with_their_path(number):
    with pytest.raises(canon.CanonError, match=r"\$\.a\[1\]\.table\.x"):
        canon.canonical({"a": [0, dataclasses.replace(WHOLE, table={"x": number})]})
    for write in (canon.content_id, canon.pretty):
        with pytest.raises(canon.CanonError):
            write(number)


@pytest.mark.parametrize("value", [{1: 2}, {None: 1}, {1, 2}, b"bytes", object(), Whole, 1j])
def test_what_json_does_not_know_is_refused(value):
    with pytest.raises(canon.CanonError, match=r"\$\.here"):
        canon.canonical({"here": value})


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}])
def test_half_a_surrogate_pair_is_refused(value):
    with pytest.raises(canon.CanonError, match="surrogate"):
        canon.content_id(value)


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "-Infinity",
        "1e999",
        '{"a":1,"a":1}',
        '{"x":{"a":1,"b":2,"a":3}}',
        "",
        "{",
        "01",
        "'a'",
        "[1,]",
        "nul",
        "1 2",
        b"\xff",
        b'{"a":"\xe9"}',
        "[" * 200_000,
        "1" * 5000,
    ],
)
def test_parse_refuses_what_is_not_strict(text):
    with pytest.raises(canon.CanonError):
        canon.parse(text)


finite = st.floats(allow_nan=False, allow_infinity=False)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | finite | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(left, right):
    """Equal in value and type, signs of zero included."""
    return repr(left) == repr(right)


@given(plain_json)
def test_parse_undoes_canonical(value):
    text = canon.canonical(value)
    assert canon.canonical(canon.parse(text)) == text
    assert canon.parse(text) == value
    assert canon.parse(canon.pretty(value)) == value


@given(finite, st.integers(), st.none() | st.text(), st.lists(st.integers()))
def test_records_come_back(weight, count, label, sizes):
    part = Part(kind="bolt", sizes=tuple(sizes))
    whole = dataclasses.replace(WHOLE, weight=weight, count=count, label=label, part=part)
    assert same(canon.decode(Whole, canon.parse(canon.canonical(whole))), whole)


def changed(**changes):
    return {**canon.to_json(WHOLE), **changes}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"count": True}, r"\$\.count is True \(bool\): must be int"),
        ({"count": 2.0}, r"\$\.count is 2.0 \(float\): must be int"),
        ({"ready": 1}, r"\$\.ready is 1 \(int\): must be bool"),
        ({"weight": True}, r"\$\.weight is True \(bool\): must be float"),
        ({"weight": 10**400}, r"\$\.weight is an integer too large"),
        ({"label": 5}, r"\$\.label is 5 \(int\): must be str"),
        ({"part": None}, r"\$\.part is a NoneType: must be an object \(Part\)"),
        (
            {"part": {"kind": "screw", "sizes": []}},
            r"\$\.part\.kind is 'screw': must be one of 'bolt', 'nut'",
        ),
        ({"part": {"kind": "nut"}}, r"\$\.part \(Part\) lacks sizes"),
        ({"part": {"kind": "nut", "sizes": [1, "2"]}}, r"\$\.part\.sizes\[1\] is '2'"),
        ({"pair": [1]}, r"\$\.pair has 1 item: must have 2"),
        ({"table": {"x": "y"}}, r"\$\.table\.x is 'y'"),
        ({"extra": 1, "more": 2}, r"\$ \(Whole\) has the unknown 'extra', 'more'"),
    ],
)
def test_decode_is_strict(changes, message):
    with pytest.raises(canon.CanonError, match=message):
        canon.decode(Whole, changed(**changes))


def test_decode_says_missing_and_unknown_at_once():
    value = changed(wieght=1.0)
    del value["weight"], value["count"]
    with pytest.raises(canon.CanonError, match=r"lacks weight, count and has the unknown 'wieght'"):
        canon.decode(Whole, value)


def test_an_int_where_a_float_is_wanted_becomes_one():
    decoded = canon.decode(Whole, changed(weight=3, table={"a": 1}))
    assert same([decoded.weight, decoded.table["a"]], [3.0, 1.0])


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    canon.write_atomic(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        canon.write_atomic(path, b"new")
    with pytest.raises(OSError, match="no space"):
        canon.write_atomic(tmp_path / "fresh.json", b"new")
    assert path.read_bytes() == b"old"
    assert not (tmp_path / "fresh.json").exists()


def test_a_file_is_replaced_and_its_folder_synced(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)),
    )
    path = tmp_path / "record.json"
    canon.write_atomic(path, b"one")
    canon.write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    assert synced[2:] == [path.stat().st_ino, tmp_path.stat().st_ino]
    assert canon.file_sha256(path) == hashlib.sha256(b"two").hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    part: Part = field(metadata=canon.SHARED)
    words: dict[str, str] | None = field(default=None, metadata=canon.SHARED)


def test_shared_values_are_one_object_each():
    data = {"part": {"kind": "bolt", "sizes": [1, 2]}, "words": {"a": "b"}}
    one, two = (canon.decode(Sharing, dict(data)) for _ in range(2))
    assert one.part is two.part
    assert one.words is two.words
    assert (
        canon.decode(Sharing, data | {"part": {"kind": "bolt", "sizes": [1, 3]}}).part != one.part
    )
    for wrong in (True, 1.0):  # equal to 1
        with pytest.raises(canon.CanonError, match=r"\$.part.sizes\[0\]"):
            canon.decode(Sharing, {"part": {"kind": "bolt", "sizes": [wrong, 2]}, "words": None})


def test_no_more_is_kept_than_may_be(monkeypatch):
    monkeypatch.setattr(canon, "_MOST_SHARED", 3)
    monkeypatch.setattr(canon, "_shared", {})
    for size in range(10):
        decoded = canon.decode(Sharing, {"part": {"kind": "nut", "sizes": [size]}, "words": None})
        assert decoded.part == Part(kind="nut", sizes=(size,))
        assert len(canon._shared) <= 3

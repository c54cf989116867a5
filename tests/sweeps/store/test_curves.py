"""Tests of the files of training curves: they are exact, and a damaged one is refused."""

import dataclasses
import os

import pytest
from sweep_fakes import make_outcome, make_spec

from forerun._proxies.core import canon
from forerun._proxies.core.spec import Curve
from forerun._sweeps.store.curves import load_curve, store_curve
from forerun._sweeps.store.errors import CurveCorrupt, DiskFull

RESULT, CURVE = make_outcome(make_spec())


def test_curve_is_restored_exactly(tmp_path):
    curve = Curve(
        steps=(1, 5, 9), train_loss_nats=(0.1, 1 / 3, 5e-324), grad_norm=(1e308, 0.0, 2.0)
    )
    result = dataclasses.replace(RESULT, curve_id=canon.compute_content_id(curve))
    store_curve(tmp_path, result.id, curve)
    assert load_curve(tmp_path, result) == curve


def test_damaged_or_foreign_curve_is_refused(tmp_path):
    path = store_curve(tmp_path, RESULT.id, CURVE)
    content = path.read_bytes()
    positions = range(0, len(content), 3)
    num_refused = 0
    for position in positions:
        broken = bytearray(content)
        broken[position] ^= 0x01
        path.write_bytes(broken)
        try:
            assert load_curve(tmp_path, RESULT) == CURVE
        except CurveCorrupt:
            num_refused += 1
    assert num_refused > len(positions) / 4, "the other bytes are metadata that nobody reads"
    path.write_bytes(content[:-9])
    with pytest.raises(CurveCorrupt, match="cannot be read"):
        load_curve(tmp_path, RESULT)
    path.write_bytes(
        store_curve(tmp_path, "1" * 64, make_outcome(make_spec(seed=1))[1]).read_bytes()
    )
    with pytest.raises(CurveCorrupt, match="has content id"):
        load_curve(tmp_path, RESULT)


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch, call):
    path = store_curve(tmp_path, RESULT.id, CURVE)
    content_before = path.read_bytes()

    def raise_disk_full(*args, **kwargs):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("pathlib.Path.open" if call == "open" else "os.fsync", raise_disk_full)
    with pytest.raises(DiskFull, match="No space left"):
        store_curve(tmp_path, RESULT.id, make_outcome(make_spec(seed=1))[1])
    monkeypatch.undo()
    assert path.read_bytes() == content_before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]

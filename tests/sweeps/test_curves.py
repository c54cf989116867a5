import dataclasses
import os

import pytest
from sweep_fakes import make_spec, outcome

from proxies.core import canon
from proxies.core.spec import Curve
from sweeps.store.curves import load_curve, store_curve
from sweeps.store.errors import CurveCorrupt, DiskFull

RESULT, CURVE = outcome(make_spec())


def test_round_trip_is_exact(tmp_path):
    curve = Curve(
        steps=(1, 5, 9), train_loss_nats=(0.1, 1 / 3, 5e-324), grad_norm=(1e308, 0.0, 2.0)
    )
    result = dataclasses.replace(RESULT, curve_id=canon.content_id(curve))
    store_curve(tmp_path, result.id, curve)
    assert load_curve(tmp_path, result) == curve


def test_no_other_curve_is_ever_returned(tmp_path):
    path = store_curve(tmp_path, RESULT.id, CURVE)
    whole = path.read_bytes()
    refused = 0
    for position in range(0, len(whole), 3):
        broken = bytearray(whole)
        broken[position] ^= 0x01
        path.write_bytes(broken)
        try:
            assert load_curve(tmp_path, RESULT) == CURVE
        except CurveCorrupt:
            refused += 1
    assert refused > len(whole) / 12
    path.write_bytes(whole[:-9])
    with pytest.raises(CurveCorrupt, match="cannot be read"):
        load_curve(tmp_path, RESULT)
    path.write_bytes(store_curve(tmp_path, "1" * 64, outcome(make_spec(seed=1))[1]).read_bytes())
    with pytest.raises(CurveCorrupt, match="has content id"):
        load_curve(tmp_path, RESULT)


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch, call):
    path = store_curve(tmp_path, RESULT.id, CURVE)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("pathlib.Path.open" if call == "open" else "os.fsync", full)
    with pytest.raises(DiskFull, match="No space left"):
        store_curve(tmp_path, RESULT.id, outcome(make_spec(seed=1))[1])
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]

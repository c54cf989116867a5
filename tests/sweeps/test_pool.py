from sweep_fakes import FakeHostFactory, executions, make_specs, num_slots

from proxies.core import canon
from sweeps.run.pool import Advance, InlinePool


def call(specs):
    admit = tuple((slot, canon.to_json(spec)) for slot, spec in enumerate(specs))
    return Advance(bank_key="a", num_slots=num_slots(specs[0]), admit=admit, max_steps=10)


def test_a_call_is_carried_out_when_waited_for(tmp_path):
    pool = InlinePool(FakeHostFactory(str(tmp_path / "diary")))
    assert pool.wait(1.0) == []
    pool.start(0, call(make_specs(2)))
    assert pool.wait(0.0) == []  # a stop never begins work
    (report,) = pool.wait(1.0)
    assert report.error is None
    assert [end.slot for end in report.finished] == [0, 1]
    assert len(executions(tmp_path / "diary")) == 2
    pool.close()


def test_an_exception_is_a_report_and_restart_empties_the_host(tmp_path):
    pool = InlinePool(FakeHostFactory(str(tmp_path / "diary"), fault="raise 1"))
    pool.start(0, call(make_specs(2)))
    (report,) = pool.wait(1.0)
    assert report.error == "ValueError: the corpus is not there"
    pool.restart(0)
    pool.start(0, call(make_specs(1)))
    assert pool.wait(1.0)[0].error is None

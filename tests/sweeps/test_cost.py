"""A trial costs the driver as much at the end of a long search as at its beginning: calls are counted, not seconds."""

import cProfile

from soak_case import TrivialHost
from spaces import SPACE
from sweep_fakes import bank_key, make_run, num_slots

from sweeps.run.driver import drive
from sweeps.run.pool import InlinePool
from sweeps.search import samplers
from sweeps.search.source import Search, SearchSource
from sweeps.store.ledger import Ledger


def calls(study_dir, num_trials):
    """Function calls that a search of so many trials takes, from the plan to the last outcome."""
    profile = cProfile.Profile()
    with Ledger.open(study_dir, {}, create=True) as ledger:
        search = Search(SPACE, 1, 3, num_startup=4)
        source = SearchSource(search, make_run, ledger, stage="s", num_trials=num_trials)
        profile.enable()
        drive(
            source, InlinePool(TrivialHost), ledger, study_dir, num_slots_for=num_slots, bank_key_for=bank_key
        )  # fmt: skip
        profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


def test_a_search_of_twice_the_trials_takes_twice_the_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("sweeps.search.past_trials.NUM_BEST", 3)
    monkeypatch.setattr(samplers, "MOST_SHOWN", 8)
    calls(tmp_path / "first", 6)  # imports and caches
    first, second, third = (calls(tmp_path / str(number), number) for number in (15, 30, 60))
    assert (third - second) / (second - first) < 2.2, "2 where each trial costs the same, 4 where each looks at all"


def test_it_would_be_noticed(tmp_path, monkeypatch):
    """The mutation check: TPE without its bound looks at all."""
    calls(tmp_path / "first", 6)
    first, second, third = (calls(tmp_path / str(number), number) for number in (15, 30, 60))
    assert (third - second) / (second - first) > 2.2

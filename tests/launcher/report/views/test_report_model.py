"""Tests of the typed report: reading and writing it gives the same JSON, and others are refused."""

import pytest
from example_report import make_finished_body
from unusual_transfer import NAMES, make_unusual_body

from forerun._launcher.report.views.report_model import to_report
from forerun._proxies.core import canon


@pytest.mark.parametrize("name", [None, *NAMES])
def test_report_is_written_as_it_was_read(name):
    body = make_unusual_body(name) if name else make_finished_body()
    assert canon.to_canonical_json(to_report(body).to_json()) == canon.to_canonical_json(body)


def test_report_of_a_real_study_is_written_as_it_was_read(finished_study_dir):
    content = (finished_study_dir / "study" / "report.json").read_bytes()
    assert canon.to_pretty_json(to_report(canon.parse(content)).to_json()) == content


def test_keys_of_a_later_version_are_kept_and_integers_stay_integers():
    body = make_finished_body()
    body["choice"]["prediction"] |= {"loss": 2, "surprise": {"value": 1}}
    body["transfer"]["tests"][0]["verdict"]["optima"][0]["surprise"] = [1, 2.0]
    assert canon.to_canonical_json(to_report(body).to_json()) == canon.to_canonical_json(body)


@pytest.mark.parametrize(
    ("section", "key"), [("transfer", "together"), ("fit", "level"), ("spend", "num_runs")]
)
def test_section_without_a_required_key_is_refused(section, key):
    body = make_finished_body()
    del body[section][key]
    with pytest.raises(ValueError, match=f"{section}.{key}"):
        to_report(body)

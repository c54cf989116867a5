"""Fixtures of the tests of the Python interface: the studies of the launcher's tests."""

import study_fixtures

cached_results = study_fixtures.cached_results
finished_study_dir = study_fixtures.finished_study_dir
frozen_study = study_fixtures.frozen_study

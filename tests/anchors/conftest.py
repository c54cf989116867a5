"""The corpus that the negative anchors train on."""

import pytest
from proxy_cases import write_corpus

from forerun._proxies.data.tokens import TokenStore


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A corpus of 300 texts, enough that no run of a sweep reads a sequence twice."""
    return TokenStore(write_corpus(tmp_path_factory.mktemp("corpus"), num_documents=300))

import pytest
from proxy_cases import write_corpus

from proxies.data.tokens import TokenStore


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder of a structured corpus of about 300 kB."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def store(corpus):
    return TokenStore(corpus)

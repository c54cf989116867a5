import pytest
from proxy_cases import write_corpus

from proxies.data.tokens import TokenStore


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Three hundred texts: what one sweep reads, every run reads once."""
    return TokenStore(write_corpus(tmp_path_factory.mktemp("corpus"), num_documents=300))

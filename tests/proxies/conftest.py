"""Corpora and engine settings that tests of the proxies share."""

import pytest
import torch
from proxy_cases import write_corpus, write_learned_corpus

from forerun._proxies.data.tokens import TokenStore


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder of a tokenized corpus of about 300 kB."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def store(corpus):
    """Token store of `corpus`."""
    return TokenStore(corpus)


@pytest.fixture(scope="session")
def learned_store(tmp_path_factory):
    """Token store of Python sources with a learned vocabulary of 4,096 entries."""
    return TokenStore(write_learned_corpus(tmp_path_factory.mktemp("learned")))


@pytest.fixture
def few_windows(monkeypatch):
    """Validate on 16 sequences, enough for tiny models; restore torch's settings afterwards."""
    monkeypatch.setattr("forerun._proxies.training.run_progress.VALIDATION_SEQUENCES", 16)
    threads, precision, generator = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_rng_state(),
    )
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_rng_state(generator)

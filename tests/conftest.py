"""`pytest -m gpu` reads the test files with that mark alone: others import what a lent GPU machine
may lack.
"""

MARK = "@pytest.mark.gpu\n"


def pytest_ignore_collect(collection_path, config):
    """Files without the mark, and folders without such a file, whose `conftest.py` is then not
    imported either.
    """
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(MARK in path.read_text() for path in files) else True

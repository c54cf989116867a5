"""Collection for `pytest -m gpu`, which imports only the files that have the mark.

Other files import packages that a GPU machine may lack.
"""

MARK = "@pytest.mark.gpu\n"


def pytest_ignore_collect(collection_path, config):
    """Ignore files without the mark, and folders without such a file, under `pytest -m gpu`.

    The `conftest.py` of an ignored folder is not imported either.
    """
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(MARK in path.read_text() for path in files) else True

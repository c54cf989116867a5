"""An export comes whole or not at all, whichever of its steps is the last one that is done."""

import os
import signal
from pathlib import Path

import pytest

from launcher.exporters import placing
from launcher.exporters.placing import put, scratch_beside, undisturbed

NEW = {"fidelity.json": "new", "run.sh": "new", "inner": "new"}


def export(target, inside=True):
    with scratch_beside(target, inside=inside) as scratch:
        for name, text in NEW.items():
            (scratch / name).write_text(text)
        put(scratch, target, first="fidelity.json")


def content(target):
    return {str(path.relative_to(target)): path.read_text() for path in sorted(target.rglob("*")) if path.is_file()}


def killed_at(step, action):
    """Run `action` in a child that ends, with no word and no clean-up, before its `step`-th rename; whether it did."""
    child = os.fork()
    if child == 0:
        count, rename = 0, Path.rename

        def counted(path, to):
            nonlocal count
            count += 1
            if count == step:
                os._exit(9)
            return rename(path, to)

        Path.rename = counted
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("earlier", [None, {}, {"fidelity.json": "old", "run.sh": "old", "gone.py": "old"}])
@pytest.mark.parametrize("inside", [True, False])
def test_a_killed_export_is_made_whole_by_the_next(tmp_path, earlier, inside):
    for step in range(1, 20):
        target = tmp_path / str(step) / "trainer"
        target.parent.mkdir()
        if earlier is not None:
            target.mkdir()
            for name, text in earlier.items():
                (target / name).write_text(text)
        killed = killed_at(step, lambda target=target: export(target, inside))
        if earlier is None and killed:
            assert not target.exists(), "a new folder comes in one step"
        elif killed and step > 1:
            assert (target / "fidelity.json").is_file(), "what says that these files are an export's"
        export(target, inside)
        assert content(target) == NEW
        assert [path.name for path in target.parent.iterdir()] == ["trainer"]
        if not killed:
            return
    pytest.fail("it never came to an end")


def test_a_failed_export_leaves_all_as_it_was(tmp_path, monkeypatch):
    for target in (tmp_path / "made", tmp_path / "new" / "deep"):
        with pytest.raises(KeyboardInterrupt), scratch_beside(target, inside=True) as scratch:
            (scratch / "run.sh").write_text("half")
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_the_folder_itself_stays_and_so_do_empty_ones_and_others_at_work(tmp_path):
    target = tmp_path / "out"
    (target / "mine").mkdir(parents=True)
    number = target.stat().st_ino
    other = target / f".out.{os.getppid()}.part"
    other.mkdir()
    export(target)
    assert target.stat().st_ino == number
    assert (target / "mine").is_dir()
    assert other.is_dir(), "its process is alive"


def test_only_scratch_folders_of_the_dead_are_left_overs(tmp_path):
    target = tmp_path / "out"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    for name in (f".out.{child}.part", f".other.{child}.part", ".out.x.part", ".out.1.part", f"out.{child}.part"):
        (tmp_path / name).mkdir()
    assert [path.name for path in placing.left_of(target)] == [f".out.{child}.part"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ask_to_end_waits_for_the_end_of_the_block(number):
    done = []
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), undisturbed():
            signal.raise_signal(number)
            done.append(1)
        assert done == [1]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)

"""What is said of checkpoints that a run does not go on from: of corrupt ones in its chronicle too."""

import pytest

from launcher.base import chronicle
from launcher.base.checkpoint_folders import Refused, tell

DIGEST = "a1" * 32
ROTTEN = Refused(step=8, text="checkpoint step-00000008 is corrupt", corrupt=True)
LEFT = Refused(
    step=12, text="checkpoint step-00000012 is of a path that the run went back from: deleted", corrupt=False
)


def test_corrupt_ones_are_chronicled_and_all_are_said(tmp_path, capsys):
    tell(tmp_path, DIGEST, [ROTTEN, LEFT])
    assert capsys.readouterr().err == f"{ROTTEN.text}\n{LEFT.text}\n"
    (entry,) = chronicle.entries(tmp_path)
    assert (entry.kind, entry.step, entry.digest, entry.text) == ("corrupt", 8, DIGEST, ROTTEN.text)


def test_a_run_goes_on_where_the_chronicle_cannot_be_written(tmp_path, capsys):
    (tmp_path / chronicle.CHRONICLE_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        chronicle.record(tmp_path, "note", "x")
    tell(tmp_path, DIGEST, [ROTTEN])
    assert "chronicle.jsonl: No space left on device; not recorded" in capsys.readouterr().err

"""Tests of docs/recording.py, which records a session of commands in a terminal."""

import json
import sys

import recording


def test_recording_shows_commands_with_output_and_exit_codes(tmp_path):
    events = recording.record(["forerun status nowhere"], tmp_path)
    head, *rows = map(json.loads, recording.format_cast(events).splitlines())
    assert (head["version"], head["width"]) == (2, recording.COLUMNS)
    assert [seconds for seconds, _, _ in rows] == sorted(seconds for seconds, _, _ in rows)
    lines = recording.format_plain(events).splitlines()
    assert lines[0] == "$ forerun status nowhere" and "nowhere" in lines[1]
    assert lines[-2:] == ["$ echo $?", "2"]
    assert str(tmp_path) not in "".join(lines)


def test_recording_keeps_only_the_last_version_of_a_line(tmp_path):
    events, code = recording.run_in_terminal(
        [sys.executable, "-c", "print('10 %', end='\\r'); print('\\x1b[1mdone\\x1b[0m')"], tmp_path
    )
    assert (recording.format_plain(events), code) == ("done\n", 0)

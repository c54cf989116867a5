"""What a benchmark says of a command's cost is of all that the command started, orphans too."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
# A child that is waited for, and one that outlives its parent; both by way of a shell.
COMMAND = f"""
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", {BURN.format(seconds=0.8)!r}])
print("half of it", flush=True)
subprocess.Popen([sys.executable, "-S", "-c", {BURN.format(seconds=1.2)!r}])
"""
PROGRAM = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
from process_tree import measured
cost = measured([sys.executable, "-S", "-c", Path(sys.argv[1]).read_text()], {{}}, Path(sys.argv[2]), mark="half of it")
print(json.dumps([cost.cpu_seconds, cost.cpu_seconds_at(cost.marked), cost.seconds, cost.marked - cost.began]))
"""


def measured(tmp_path, command):
    """In a process of its own: who measures becomes the parent of orphans."""
    (tmp_path / "command.py").write_text(command)
    program = [sys.executable, "-c", PROGRAM, tmp_path / "command.py", tmp_path / "log"]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_orphans_count_and_the_mark_is_seen(tmp_path):
    done = measured(tmp_path, COMMAND)
    cpu_seconds, at_mark, seconds, marked = json.loads(done.stdout)
    assert 1.8 < cpu_seconds < 3.5  # 2 s are burnt; what was used after the last look is lost
    assert 0.6 < at_mark < cpu_seconds - 0.5
    assert 0 < marked <= seconds + 0.2


def test_a_command_that_fails_is_said_with_its_last_words(tmp_path):
    done = measured(tmp_path, "raise SystemExit('no such plan')")
    assert done.returncode == 1
    assert "exit code 1: no such plan" in done.stderr

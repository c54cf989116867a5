"""The launch script that exports share, run with a torchrun that only tells its arguments."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from launcher.exporters.foreign import by_layer
from launcher.exporters.writing import run_script, write_files
from launcher.frozen.launch_file import RUN_FILE


def launched(tmp_path, num_ranks, **env):
    decision = SimpleNamespace(digest="d", parallelism=SimpleNamespace(num_ranks=num_ranks))
    script = run_script(decision, "it 1.0", notes="Needs nothing.", setup="export SET=1", command='"$here/x" "$@"')
    write_files(tmp_path, {RUN_FILE: script, "sub/torchrun": '#!/bin/sh\necho "$SET" "$@"\n'})
    (tmp_path / "sub" / "torchrun").chmod(0o755)
    path = {"PATH": f"{tmp_path / 'sub'}:{os.environ['PATH']}"}
    return subprocess.run(
        [tmp_path / RUN_FILE, "a b"], env={**path, **env}, capture_output=True, text=True, check=False, timeout=30
    )


@pytest.mark.parametrize(
    ("num_ranks", "env", "nodes", "per_node"),
    [(1, {}, 1, 1), (12, {}, 2, 6), (64, {}, 8, 8), (64, {"RANKS_PER_NODE": "4"}, 16, 4)],
)
def test_ranks_are_dealt_to_nodes(tmp_path, num_ranks, env, nodes, per_node):
    done = launched(tmp_path, num_ranks, **env)
    head = f"1 --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint localhost:0 "
    assert done.stdout == f"{head}{tmp_path}/x a b\n"


@pytest.mark.parametrize("per_node", ["3", "16", "0"])
def test_ranks_that_do_not_fill_the_nodes_do_not_start(tmp_path, per_node):
    done = launched(tmp_path, 8, RANKS_PER_NODE=per_node)
    assert done.returncode != 0
    assert done.stdout == ""


def test_names_fold_by_layer():
    assert by_layer(["norm.weight", "layers.0.wq.weight", "layers.11.wq.weight", "layers.1.wo.weight"]) == {
        ("norm.weight", ""): [],
        ("layers.", ".wq.weight"): ["0", "11"],
        ("layers.", ".wo.weight"): ["1"],
    }

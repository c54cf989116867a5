"""Tests of the Megatron-LM export's run.sh with a fake torchrun.

The fake prints its arguments or a planted log.
"""

import os
import subprocess
import sys

import pytest
from megatron_lm_case import make_megatron_decision, make_megatron_spec

from forerun._launcher.main_run.exporters.trainers import megatron_lm

LOG = """
import sys
for step, loss in enumerate({losses}, 1):
    print(f" [2026-01-01 00:00:00] iteration {{step:8d}}/      12 | elapsed time per iteration (ms): 1.0 | "
          f"learning rate: 1.0E-03 | lm loss: {{loss:.6E}} | loss scale: 1.0 | grad norm: 9.0 |", flush=True)
"""  # noqa: E501


@pytest.fixture
def launch(tmp_path, manifest):
    """A function that runs the export's run.sh with a fake torchrun."""
    decision = make_megatron_decision(manifest, make_megatron_spec(manifest.data_id), num_ranks=4)
    megatron_lm.export(decision, tmp_path)
    (tmp_path / "run" / "seed").mkdir(parents=True)
    (tmp_path / "run" / "seed" / "latest_checkpointed_iteration.txt").write_text("release")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data_args.txt").write_text("/d/text")

    checkout = tmp_path / "m" / "megatron" / "core"
    checkout.mkdir(parents=True)

    def run_script(fake, version=megatron_lm.VERSIONS[-1], **env):
        (checkout / "package_info.py").write_text(f"__version__ = {version!r}")
        (tmp_path / "torchrun").write_text(fake)
        (tmp_path / "torchrun").chmod(0o755)
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "MEGATRON_LM": str(tmp_path / "m"),
            "MEGATRON_DATA": str(tmp_path / "d"),
        }
        return subprocess.run(
            [tmp_path / "run.sh", "--exit-interval", "3"],
            env={**environment, "RUN_DIR": str(tmp_path / "run"), **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    return run_script


def test_launch_line_has_every_argument_and_the_environment(tmp_path, launch):
    process = launch('#!/bin/sh\necho "$CUDA_DEVICE_MAX_CONNECTIONS $PYTHONPATH" "$@"\n')
    assert process.returncode == 0, process.stderr
    words = process.stdout.split()
    # Both folders are needed: a layer spec is in the export's folder.
    assert words[:2] == ["1", f"{tmp_path}:{tmp_path}/m"]
    assert (words[words.index("--nnodes") + 1], words[words.index("--nproc-per-node") + 1]) == (
        "1",
        "4",
    )
    first = words.index(f"{tmp_path}/m/pretrain_gpt.py") + 1
    arguments = (tmp_path / "arguments.txt").read_text().split()
    assert words[first : first + len(arguments)] == arguments
    run = tmp_path / "run"
    assert words[first + len(arguments) :] == [
        "--data-args-path",
        f"{tmp_path}/d/data_args.txt",
        "--save",
        f"{run}/checkpoints",
        "--load",
        f"{run}/checkpoints",
        "--pretrained-checkpoint",
        f"{run}/seed",
        "--exit-interval",
        "3",
    ]


def test_run_without_initial_weights_or_data_is_refused(tmp_path, launch):
    fake = "#!/bin/sh\necho started\n"
    refused = launch(fake, RUN_DIR="/nowhere")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "seed_checkpoint.py /nowhere/seed" in refused.stderr
    assert launch(fake, MEGATRON_DATA="").returncode != 0
    refused = launch(fake, MEGATRON_DATA="/nowhere")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "convert_data.py CORPUS /nowhere" in refused.stderr


def test_other_version_of_megatron_lm_is_refused(launch):
    fake = "#!/bin/sh\necho started\n"
    assert launch(fake, version="0.19.2+local").returncode == 0
    for version in ("0.20.0rc0", "0.19.1"):
        refused = launch(fake, version=version)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"{version}: must be 0.19.2" in refused.stderr
    refused = launch(fake, MEGATRON_LM="/nowhere")
    assert (refused.returncode, refused.stdout) == (2, "") and "no known version" in refused.stderr


def test_loss_above_the_ceiling_stops_the_run_after_the_warmup(launch):
    # The ceiling is ln(256) + 1 = 6.545 nats, and the warmup has 3 steps.
    fake = f"#!{sys.executable}\n"
    calm = launch(fake + LOG.format(losses=[9.0, 9.0, 9.0, 9.0, *[5.0] * 8]))
    assert calm.returncode == 0
    assert calm.stdout.count("lm loss") == 12
    wild = launch(fake + LOG.format(losses=[9.0, 9.0, 9.0, 9.0, 6.6, *[5.0] * 100_000]))
    assert wild.returncode != 0
    assert "training loss 6.6 > 6.54518 nats at step 5: stopped" in wild.stdout
    assert wild.stdout.count("lm loss") == 5, "later lines are not read"

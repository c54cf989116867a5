"""The Megatron-LM export's run.sh, with a torchrun that only tells what it was given or prints a
planted log.
"""

import os
import subprocess
import sys

import pytest
from megatron_lm_case import decision_for, spec_for

from launcher.exporters.trainers import megatron_lm

LOG = """
import sys
for step, loss in enumerate({losses}, 1):
    print(f" [2026-01-01 00:00:00] iteration {{step:8d}}/      12 | elapsed time per iteration (ms): 1.0 | "
          f"learning rate: 1.0E-03 | lm loss: {{loss:.6E}} | loss scale: 1.0 | grad norm: 9.0 |", flush=True)
"""  # noqa: E501


@pytest.fixture
def launched(tmp_path, manifest):
    decision = decision_for(manifest, spec_for(manifest.data_id), num_ranks=4)
    megatron_lm.export(decision, tmp_path)
    (tmp_path / "run" / "seed").mkdir(parents=True)
    (tmp_path / "run" / "seed" / "latest_checkpointed_iteration.txt").write_text("release")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data_args.txt").write_text("/d/text")

    checkout = tmp_path / "m" / "megatron" / "core"
    checkout.mkdir(parents=True)

    def launch(fake, version=megatron_lm.VERSIONS[-1], **env):
        (checkout / "package_info.py").write_text(f"__version__ = {version!r}")
        (tmp_path / "torchrun").write_text(fake)
        (tmp_path / "torchrun").chmod(0o755)
        told = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "MEGATRON_LM": str(tmp_path / "m"),
            "MEGATRON_DATA": str(tmp_path / "d"),
        }
        return subprocess.run(
            [tmp_path / "run.sh", "--exit-interval", "3"],
            env={**told, "RUN_DIR": str(tmp_path / "run"), **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    return launch


def test_the_launch_line_holds_every_argument_and_the_environment(tmp_path, launched):
    done = launched('#!/bin/sh\necho "$CUDA_DEVICE_MAX_CONNECTIONS $PYTHONPATH" "$@"\n')
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    # a layer spec lies in the export's folder
    assert words[:2] == ["1", f"{tmp_path}:{tmp_path}/m"]
    assert (words[words.index("--nnodes") + 1], words[words.index("--nproc-per-node") + 1]) == (
        "1",
        "4",
    )
    first = words.index(f"{tmp_path}/m/pretrain_gpt.py") + 1
    told = (tmp_path / "arguments.txt").read_text().split()
    assert words[first : first + len(told)] == told
    run = tmp_path / "run"
    assert words[first + len(told) :] == [
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


def test_without_initial_weights_or_data_nothing_starts(tmp_path, launched):
    fake = "#!/bin/sh\necho started\n"
    refused = launched(fake, RUN_DIR="/nowhere")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "seed_checkpoint.py /nowhere/seed" in refused.stderr
    assert launched(fake, MEGATRON_DATA="").returncode != 0
    refused = launched(fake, MEGATRON_DATA="/nowhere")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "convert_data.py CORPUS /nowhere" in refused.stderr


def test_another_version_of_megatron_lm_does_not_start(launched):
    fake = "#!/bin/sh\necho started\n"
    assert launched(fake, version="0.19.2+local").returncode == 0
    for version in ("0.20.0rc0", "0.19.1"):
        refused = launched(fake, version=version)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"{version}: must be 0.19.2" in refused.stderr
    refused = launched(fake, MEGATRON_LM="/nowhere")
    assert (refused.returncode, refused.stdout) == (2, "") and "no known version" in refused.stderr


def test_a_loss_above_the_ceiling_stops_the_run_after_the_warmup(launched):
    fake = f"#!{sys.executable}\n"  # ceiling ln(256) + 1 = 6.545, warmup 3 steps
    calm = launched(fake + LOG.format(losses=[9.0, 9.0, 9.0, 9.0, *[5.0] * 8]))
    assert calm.returncode == 0
    assert calm.stdout.count("lm loss") == 12
    wild = launched(fake + LOG.format(losses=[9.0, 9.0, 9.0, 9.0, 6.6, *[5.0] * 100_000]))
    assert wild.returncode != 0
    assert "training loss 6.6 > 6.54518 nats at step 5: stopped" in wild.stdout
    assert wild.stdout.count("lm loss") == 5  # what came after was not read

"""Tests of `forerun.hook` with the Hugging Face Trainer on one rank and on two.

The tests need an interpreter with transformers (`make trainers TRAINERS=huggingface`).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from trainer_venv import build_torchrun_command, require_interpreter

from forerun import hook
from forerun._launcher.main_run.supervisor import user_proof

PROGRAM = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from hook import prove

class Prove(TrainerCallback):
    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **more):
        prove(model, optimizer, lr_scheduler)

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                     vocab_size=64, tie_word_embeddings=True))
ids = torch.randint(64, (256, 16))
rows = [{"input_ids": row, "labels": row} for row in ids]
args = TrainingArguments(
    output_dir=sys.argv[1], max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    learning_rate=3e-3, warmup_steps=4, max_grad_norm=0.5, weight_decay=0.1, lr_scheduler_type="cosine",
    use_cpu=True, report_to="none", disable_tqdm=True,
)
Trainer(model=model, args=args, train_dataset=rows, callbacks=[Prove()]).train()
raise SystemExit("the hook did not end it")
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hook_reports_batches_clipping_rates_and_groups_of_the_trainer(num_ranks, tmp_path):
    python = require_interpreter("huggingface")
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "hook.py").write_bytes(Path(hook.__file__).read_bytes())
    request = {"report": str(tmp_path / "report.json"), "steps": 5, "at": list(range(20))}
    (tmp_path / "request.json").write_text(json.dumps(request))
    start = build_torchrun_command(python, num_ranks) if num_ranks > 1 else [python]
    environment = {
        "PATH": os.environ["PATH"],
        hook.VARIABLE: str(tmp_path / "request.json"),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [*start, "train.py", tmp_path / "out"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    report = user_proof._read((tmp_path / "report.json").read_bytes())
    assert (report.world_size, len(report.observed), len(report.rates)) == (num_ranks, 5, 20)
    # A rank reads 4 rows of 16 tokens in each of 2 accumulation steps.
    assert {row.ids for row in report.observed} == {4 * 2 * 16}
    assert {row.clip for row in report.observed} == {0.5}
    # The rates that the Trainer's loop used equal those of its scheduler; the warmup begins at 0.
    assert [row.rates for row in report.observed] == [
        pytest.approx(row) for row in report.rates[:5]
    ]
    assert report.rates[0] == (0.0, 0.0) and max(report.rates)[0] == 3e-3
    assert {group.numbers["weight_decay"] for group in report.groups} == {0.1, 0.0}
    tied = next(
        parameter
        for parameter in report.parameters
        if "model.embed_tokens.weight" in parameter.names
    )
    assert len(tied.names) == 2
    assert len(tied.groups) == 1
    assert all(parameter.trained for parameter in report.parameters)
    assert not list((tmp_path / "out").rglob("*.safetensors"))

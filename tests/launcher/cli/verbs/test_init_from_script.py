"""Tests of `forerun init --from train.py`, which writes a plan for the user's training script.

The options of the script become the plan's command, for four ways of declaring options. The script
itself is read, never run.
"""

import itertools
import json
import re

import pytest
from tiny_study import run_json

from forerun._launcher.study.plan.file import load_plan

ARGPARSE = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--max-lr", type=float, default=6e-4)
parser.add_argument("--muon-lr", type=float, default=0.02)
parser.add_argument("--d-model", type=int); parser.add_argument("--max-iters", type=int)
parser.add_argument("--seed", type=int); parser.add_argument("--n-layer", type=int, default=3)
parser.add_argument("--out-dir"); parser.add_argument("--compile", action="store_true")
raise SystemExit("it was run")
print(json.dumps({"step": 1, "loss": 2.0})); print(json.dumps({"val/loss": 2.0}))
"""
DATACLASS = """
from dataclasses import dataclass
import wandb, tyro
@dataclass
class Args:
    learning_rate: float = 1e-3
    hidden_size: int = 256
    max_steps: int = 1000
    seed: int = 0
    warmup_steps: int = 10
wandb.init(); wandb.log({"train/loss": 1.0, "eval/loss": 1.0})
"""
HYDRA = """
import hydra
@hydra.main(config_path="conf")
def main(cfg):
    train(cfg.optim.lr, cfg.model.width, cfg.trainer.max_steps, cfg.seed)
"""
GLOBALS = """
learning_rate = 6e-4
n_embd = 768
max_iters = 600
seed = 1337
block_size = 128
exec(open("configurator.py").read())
"""


NANOGPT = """
eval_interval = 250
eval_iters = 20
wandb_log = False
gradient_accumulation_steps = 5 * 8
batch_size = 12
n_embd = 384
n_layer = 6
learning_rate = 1e-3
max_iters = 5000
decay_lr = True
lr_scheduler_type = "cosine"
lr_decay_iters = 5000
muon_lr = 0.02
seed = 1
best_val_loss = 1e9
exec(open("configurator.py").read())
saved = {"model": model, "best_val_loss": best_val_loss}
wandb.init(); wandb.log({"iter": 0, "train/loss": 1.0, "val/loss": 1.0, "lr": 0.1})
"""
"""A script in the style of nanoGPT, in which every constant is an option."""


def make_plan(tmp_path, text):
    """Write a script with this text, let `init` write its plan, and return the plan."""
    (tmp_path / "train.py").write_text(text)
    code, body = run_json("init", "--from", tmp_path / "train.py", "--out", tmp_path / "plan.toml")
    assert code == 0, body
    return load_plan(tmp_path / "plan.toml")


def test_argparse_options_become_a_command(tmp_path):
    plan = make_plan(tmp_path, ARGPARSE)
    assert plan.proxy.command.partition(" ")[2] == (
        "train.py --max-lr {lr} --d-model {width} --max-iters {num_steps} --seed {seed} "
        "--n-layer {num_layers} --out-dir {run_dir} --muon-lr TODO"
    )
    assert plan.model.num_layers == 3


@pytest.mark.parametrize(
    ("text", "command_parts"),
    [
        (
            DATACLASS,
            ["--learning_rate {lr}", "--hidden_size {width}", "--warmup_steps {warmup_steps}"],
        ),
        (
            HYDRA,
            [
                "optim.lr={lr}",
                "model.width={width}",
                "trainer.max_steps={num_steps}",
                "seed={seed}",
            ],
        ),
        (GLOBALS, ["--learning_rate={lr}", "--n_embd={width}", "--block_size={seq_len}"]),
    ],
    ids=["dataclass", "hydra", "globals"],
)
def test_other_kinds_of_options_become_a_command(text, command_parts, tmp_path):
    plan = make_plan(tmp_path, text)
    assert all(part in plan.proxy.command for part in command_parts)
    assert plan.proxy.metrics_format == ("wandb" if "wandb" in text else "jsonl")


def test_all_missing_options_are_named_at_once(tmp_path):
    (tmp_path / "train.py").write_text(
        ARGPARSE.replace('"--seed"', '"--entropy"').replace('"--d-model"', '"--size"')
    )
    code, body = run_json("init", "--from", tmp_path / "train.py", "--out", tmp_path / "plan.toml")
    problems = json.dumps(body["problems"])
    assert code == 2 and "{width}" in problems and "{seed}" in problems
    assert not (tmp_path / "plan.toml").exists()


def test_missing_script_is_refused(tmp_path):
    assert run_json("init", "--from", tmp_path / "none.py", "--out", tmp_path / "plan.toml")[0] == 2


def test_unknown_options_become_todos_that_are_refused(tmp_path):
    command = make_plan(tmp_path, NANOGPT).proxy.command
    unknown = ("lr_decay_iters", "eval_interval", "gradient_accumulation_steps", "muon_lr")
    assert all(f"--{name}=TODO" in command for name in unknown)
    assert "--batch_size={batch_sequences}" in command
    assert not re.search("--(decay_lr|lr_scheduler_type|eval_iters|wandb_log)", command)
    plan = tmp_path / "plan.toml"
    for line in (("validate", plan), ("sweep", plan, "--study", tmp_path / "study")):
        code, body = run_json(*line)
        assert (code, body["error"]) == (2, "PlanError")
        assert [problem.partition(" ")[0] for problem in body["problems"]] == [
            "data.external",
            "proxy.command",
            "proxy.metrics_train_loss_key",
            "proxy.metrics_validation_loss_key",
        ]
    assert not (tmp_path / "study").exists()
    # With a value of its own in place of each TODO, the plan is valid
    values = map(str, itertools.count(1))
    plan.write_text(re.sub(r"TODO(: [^\n\")]+)?", lambda _: next(values), plan.read_text()))
    assert run_json("validate", plan)[0] == 0


def test_vocabulary_size_is_taken_from_the_script(tmp_path):
    plan = make_plan(tmp_path, NANOGPT.replace("n_layer = 6", "n_layer = 6\nvocab_size = 4096"))
    assert plan.data.vocab_size == 4096 and "TODO" not in plan.data.external


@pytest.mark.parametrize("name", ["min_lr", "learning_rate_min", "lr_decay", "min_lr_ratio"])
@pytest.mark.parametrize(
    "text", [NANOGPT, ARGPARSE, DATACLASS, HYDRA], ids=["globals", "argparse", "dataclass", "hydra"]
)
def test_second_learning_rate_becomes_a_todo(tmp_path, text, name):
    """The user must decide, because a fixed minimum could be above a searched rate.

    Each replacement below declares the option in one kind of script, and changes no other kind.
    """
    text = text.replace("best_val_loss = 1e9", f"{name} = 6e-5")
    text = text.replace(
        'parser.add_argument("--out-dir")',
        f'parser.add_argument("--{name}", type=float, default=6e-5)',
    )
    text = text.replace("    warmup_steps: int", f"    {name}: float = 6e-5\n    warmup_steps: int")
    text = text.replace("train(cfg.optim.lr", f"train(cfg.optim.{name}, cfg.optim.lr")
    assert re.search(rf"\b{name}[= ]TODO", make_plan(tmp_path, text).proxy.command)

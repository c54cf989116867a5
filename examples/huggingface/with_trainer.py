"""Train the Llama of llama.py with transformers' Trainer. Comments mark the lines for forerun.

The log metrics.jsonl is what forerun reads.
"""

import json

from llama import make_data, make_model, make_optimizer, parse_options
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from forerun.hook import prove  # forerun: compares this run with the frozen config

MAX_STEPS_WITHOUT_CHECKPOINTS = 300
"""Number of steps up to which a run saves nothing. The proxies of plan.toml take at most 240 steps;
the main run takes more and must be able to resume.
"""


class ForerunCallback(TrainerCallback):
    """A callback that calls forerun's hook and writes the Trainer's log as JSON lines."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(
        self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_
    ):
        """Call forerun's hook, which compares the model's settings with the frozen config."""
        # forerun: returns at once unless `forerun verify --prove` runs this script
        prove(model, optimizer, lr_scheduler)

    def on_log(self, args, state, control, logs=None, **_):
        """Append a line to the log."""
        # The Trainer's names, and those that forerun reads
        names = {"loss": "train_loss", "eval_loss": "val_loss", "grad_norm": "grad_norm"}
        line = {name: logs[key] for key, name in names.items() if key in logs}
        if line:
            with self.path.open("a") as log:
                print(json.dumps({"step": state.global_step, **line}), file=log)


class OrderedTrainer(Trainer):
    """A Trainer that keeps the order of the rows, which are shuffled already."""

    def _get_train_sampler(self, *_):
        """Return a sampler that keeps the order of the rows."""
        return SequentialSampler(self.train_dataset)


def main(options):
    """Train, evaluate and log."""
    model = make_model(options)
    train, validation = make_data(options)
    args = TrainingArguments(
        output_dir=options.out / "checkpoints",
        max_steps=options.num_steps,
        per_device_train_batch_size=options.batch_sequences,
        per_device_eval_batch_size=32,
        max_grad_norm=options.clip_norm,
        logging_steps=1,
        seed=options.seed,
        save_strategy="steps" if options.num_steps > MAX_STEPS_WITHOUT_CHECKPOINTS else "no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_steps=20,
        save_total_limit=2,
    )
    trainer = OrderedTrainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=validation,
        optimizers=make_optimizer(model, options),
        callbacks=[ForerunCallback(options.out / "metrics.jsonl")],
    )
    trainer.train(
        resume_from_checkpoint=options.resume
        and any((options.out / "checkpoints").glob("checkpoint-*"))
    )
    trainer.evaluate()


if __name__ == "__main__":
    main(parse_options())

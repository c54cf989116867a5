"""The Llama in transformers' own Trainer. Forerun's lines are marked; the log is what it reads."""

import json

from llama import data_of, model_of, optimizer_of, options
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from forerun.hook import prove  # forerun: the proof


class Log(TrainerCallback):
    """Each line of the Trainer's log, as JSON."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(
        self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_
    ):
        # forerun: it returns at once unless `forerun verify --prove` asks
        prove(model, optimizer, lr_scheduler)

    def on_log(self, args, state, control, logs=None, **_):
        named = {"loss": "train_loss", "eval_loss": "val_loss", "grad_norm": "grad_norm"}
        line = {name: logs[key] for key, name in named.items() if key in logs}
        if line:
            with self.path.open("a") as log:
                print(json.dumps({"step": state.global_step, **line}), file=log)


class InOrder(Trainer):
    """Rows are drawn already."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


def main(a):
    model = model_of(a)
    train, held = data_of(a)
    args = TrainingArguments(
        output_dir=a.out / "checkpoints",
        max_steps=a.num_steps,
        per_device_train_batch_size=a.batch_sequences,
        per_device_eval_batch_size=32,
        max_grad_norm=a.clip_norm,
        logging_steps=1,
        seed=a.seed,
        save_strategy="steps" if a.num_steps > 300 else "no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_steps=20,
        save_total_limit=2,
    )
    trainer = InOrder(
        model,
        args,
        train_dataset=train,
        eval_dataset=held,
        optimizers=optimizer_of(model, a),
        callbacks=[Log(a.out / "metrics.jsonl")],
    )
    trainer.train(
        resume_from_checkpoint=a.resume and any((a.out / "checkpoints").glob("checkpoint-*"))
    )
    trainer.evaluate()


if __name__ == "__main__":
    main(options())

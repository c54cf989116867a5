"""Train the Llama of llama.py in a loop with Accelerate. Comments mark the lines for forerun."""

import json

import torch
from accelerate import Accelerator
from llama import make_data, make_model, make_optimizer, parse_options

from forerun.hook import prove  # forerun: compares this run with the frozen config


def main(options):
    """Train, log each step as JSON, and save every 100 steps."""
    accelerator = Accelerator(cpu=True)
    model = make_model(options)
    train, validation = make_data(options)
    loader = torch.utils.data.DataLoader(train, batch_size=options.batch_sequences)
    model, loader, *steppers = accelerator.prepare(model, loader, *make_optimizer(model, options))
    optimizer, schedule = steppers
    # forerun: returns at once unless `forerun verify --prove` runs this script
    prove(model, optimizer, schedule)
    saved, first_step = options.out / "saved", 0
    if options.resume and (saved / "step.json").exists():
        accelerator.load_state(saved)
        first_step = json.loads((saved / "step.json").read_text())
        loader = accelerator.skip_first_batches(loader, first_step)
    log = (options.out / "metrics.jsonl").open("a")
    for step, batch in enumerate(loader, first_step + 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), options.clip_norm)
        for stepper in (optimizer, schedule):
            stepper.step()
        optimizer.zero_grad()
        line = {"step": step, "train_loss": loss.item(), "grad_norm": float(norm)}
        print(json.dumps(line), file=log, flush=True)
        if step % 100 == 0:
            accelerator.save_state(saved)
            (saved / "step.json").write_text(str(step))
    with torch.no_grad():
        rows = validation[:]
        print(
            json.dumps({"step": options.num_steps, "val_loss": model(**rows).loss.item()}),
            file=log,
            flush=True,
        )


if __name__ == "__main__":
    main(parse_options())

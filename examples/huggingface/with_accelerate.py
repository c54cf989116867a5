"""The same Llama in a loop of one's own with Accelerate. Forerun's lines are marked."""

import json

import torch
from accelerate import Accelerator
from llama import data_of, model_of, optimizer_of, options

from forerun.hook import prove  # forerun: the proof


def main(a):
    accelerator = Accelerator(cpu=True)
    model = model_of(a)
    train, held = data_of(a)
    loader = torch.utils.data.DataLoader(train, batch_size=a.batch_sequences)
    model, loader, *steppers = accelerator.prepare(model, loader, *optimizer_of(model, a))
    optimizer, schedule = steppers
    # forerun: it returns at once unless `forerun verify --prove` asks
    prove(model, optimizer, schedule)
    saved, first = a.out / "saved", 0
    if a.resume and (saved / "step.json").exists():
        accelerator.load_state(saved)
        first = json.loads((saved / "step.json").read_text())
        loader = accelerator.skip_first_batches(loader, first)
    log = (a.out / "metrics.jsonl").open("a")
    for step, batch in enumerate(loader, first + 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), a.clip_norm)
        for one in (optimizer, schedule):
            one.step()
        optimizer.zero_grad()
        line = {"step": step, "train_loss": loss.item(), "grad_norm": float(norm)}
        print(json.dumps(line), file=log, flush=True)
        if step % 100 == 0:
            accelerator.save_state(saved)
            (saved / "step.json").write_text(str(step))
    with torch.no_grad():
        rows = held[:]
        print(
            json.dumps({"step": a.num_steps, "val_loss": model(**rows).loss.item()}),
            file=log,
            flush=True,
        )


if __name__ == "__main__":
    main(options())

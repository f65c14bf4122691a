"""A head on stored features in an Accelerate loop: `fl.Feed` to train, `store.dataset()` to evaluate.

python docs/loops/accelerate_loop.py OUT               trains; run again, it goes on where it was stopped
python docs/loops/accelerate_loop.py OUT --kill-at 6   ends itself by SIGKILL in step 6
torchrun --nproc-per-node 2 docs/loops/accelerate_loop.py OUT        the same on two processes
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader
from toy import arguments, make_head, make_store, note

import frostline as fl


def save(accelerator: Accelerator, feed: fl.Feed, out: Path, step: int) -> None:
    """Written aside and renamed: a folder that is called step-… is whole."""
    aside = out / f"aside-{step:06}"
    accelerator.save_state(str(aside))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # Beside Accelerate's files. register_for_checkpointing(feed) would do as well, but what it saved
        # is loaded with weights_only=False, which runs whatever is in the file.
        (aside / "feed.json").write_text(json.dumps({"step": step, "feed": feed.state_dict()}))
        aside.rename(out / f"step-{step:06}")
    accelerator.wait_for_everyone()


def resume(accelerator: Accelerator, feed: fl.Feed, out: Path) -> int:
    """The number of steps that were made."""
    whole = sorted(out.glob("step-*"))
    if not whole:
        return 0
    accelerator.load_state(str(whole[-1]))
    state = json.loads((whole[-1] / "feed.json").read_text())
    feed.load_state_dict(state["feed"])  # also onto another number of processes
    return int(state["step"])


def main(out: Path, kill_at: int) -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    with accelerator.main_process_first():
        store = make_store(out / "store")
    set_seed(0, device_specific=True)  # each rank has its own dropout; DDP gives all the weights of rank 0
    # A feed takes its rank's share of each batch of 8 and puts it on the device: there is nothing to prepare,
    # and prepare(feed) gives it back as it is. DDP weighs the ranks alike, also when their shares differ by a
    # row: Shuffle(drop_last=True) and a batch_size that the ranks divide keep them equal.
    feed = fl.Feed(store, batch_size=8, order=fl.Shuffle(seed=1), device=accelerator.device,
                   rank=rank, world_size=accelerator.num_processes)  # fmt: skip
    head = make_head()
    # A DataLoader draws a seed at each pass. From a generator of its own, not from the one that dropout
    # uses: training does not depend on how often it is evaluated.
    evaluation = DataLoader(store.dataset(), batch_size=32, generator=torch.Generator())
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    model, optimizer, evaluation = accelerator.prepare(head, optimizer, evaluation)
    step = resume(accelerator, feed, out)
    for epoch in range(feed.epoch, 3):
        model.train()
        for batch in feed:
            note(out / f"seen-{rank}.jsonl", step, epoch, batch.keys_of_rows, kill_at)
            accelerator.backward(nn.functional.cross_entropy(model(batch["x"]), batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 4 == 0:
                save(accelerator, feed, out, step)
        model.eval()
        right = []
        with torch.no_grad():
            for batch in evaluation:
                guess = model(batch["x"]).argmax(1)
                right.append(accelerator.gather_for_metrics(guess == batch["labels"]))
        accelerator.print(f"epoch {epoch}: {step} steps, accuracy {torch.cat(right).float().mean():.3f}")
    if accelerator.is_main_process:
        save_file(accelerator.unwrap_model(model).state_dict(), out / "final.safetensors")
    # The model first: DDP that outlives its process group can hang when it goes (torch 2.13, gloo).
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    given = arguments(__doc__)
    main(given.out, given.kill_at)

"""A head on stored features in the HF Trainer, from `fl.Feed` or from `store.dataset()`.

python docs/loops/hf_trainer.py OUT                  trains; run again, it goes on where it was stopped
python docs/loops/hf_trainer.py OUT --data dataset   with the Trainer's own sampler and DataLoader
python docs/loops/hf_trainer.py OUT --kill-at 6      ends itself by SIGKILL in step 6
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from toy import arguments, make_head, make_store, note
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import frostline as fl


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_head()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


class Batches(Dataset[dict[str, Any]]):
    """Item i is batch i of the feed's epoch: what the Trainer's way to resume, skipping by index, needs.

    Nothing is read for what it skips. Nothing is saved for the feed either, its place follows from the
    Trainer's own count of steps.
    """

    def __init__(self, feed: fl.Feed) -> None:
        self.feed, self.iterator, self.next = feed, iter(()), -1

    def __len__(self) -> int:
        return len(self.feed)

    def set_epoch(self, epoch: int) -> None:
        self.feed.set_epoch(epoch)
        self.next = -1

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i != self.next:
            self.feed.load_state_dict({**self.feed.state_dict(), "cursor": i})
            self.iterator = iter(self.feed)
        self.next = i + 1
        return dict(next(self.iterator))


class Resumable(TrainerCallback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any, **more: Any) -> None:
        if isinstance(train_dataloader.dataset, Batches):
            train_dataloader.dataset.set_epoch(int(state.epoch or 0))

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        # The Trainer writes its folders in place and a killed save leaves half of one: this one is whole.
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "whole").touch()


class HeadTrainer(Trainer):
    kill_at = -1

    def get_train_dataloader(self) -> DataLoader[Any]:
        if not isinstance(self.train_dataset, Batches):
            return super().get_train_dataloader()
        # One item is one batch. Accelerate has nothing to prepare: it is the rank's share, on the device.
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=lambda items: items[0])

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *more: Any) -> Tensor:
        keys = [f"clip-{row:02}" for row in inputs.pop("row").tolist()]
        file = Path(self.args.output_dir) / f"seen-{self.args.process_index}.jsonl"
        note(file, self.state.global_step, int(self.state.epoch or 0), keys, self.kill_at)
        return super().training_step(model, inputs, *more)


def main(out: Path, data: str, kill_at: int) -> None:
    store = make_store(out / "store")
    args = TrainingArguments(
        output_dir=str(out), num_train_epochs=3, per_device_train_batch_size=7, gradient_accumulation_steps=3,
        learning_rate=1e-2, save_strategy="steps", save_steps=2, seed=0, use_cpu=True, report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
        remove_unused_columns=False,  # else fields that the model's forward does not name are dropped
    )  # fmt: skip
    set_seed(0)
    train: Any = store.dataset()  # the Trainer resumes it without help
    if data == "feed":  # its batch_size is that of all ranks together
        train = Batches(fl.Feed(store, args.per_device_train_batch_size * args.world_size, device=args.device,
                                order=fl.Shuffle(seed=1), rank=args.process_index,
                                world_size=args.world_size))  # fmt: skip
    trainer = HeadTrainer(Head(), args, train_dataset=train, callbacks=[Resumable()])
    trainer.kill_at = kill_at
    whole = [path.parent for path in out.glob("checkpoint-*/whole")]
    last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    save_file(trainer.model.state_dict(), out / "final.safetensors")


if __name__ == "__main__":
    given = arguments(__doc__, data=["feed", "dataset"])
    main(given.out, given.data, given.kill_at)

"""A head on stored features in Lightning: `fl.Feed` for training, `store.dataset()` for validation.

    python docs/loops/lightning_fit.py OUT               trains; run again, it goes on where it was stopped
    python docs/loops/lightning_fit.py OUT --kill-at 6   ends itself by SIGKILL in step 6

(Not called lightning.py: Python would then import this file in place of the library.)
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toy import arguments, make_head, make_store, note

import frostline as fl


class Head(pl.LightningModule):
    def __init__(self, feed: fl.Feed, out: Path, kill_at: int) -> None:
        super().__init__()
        self.net, self.feed, self.out, self.kill_at = make_head(), feed, out, kill_at
        self.rng: Tensor | None = None

    def on_train_start(self) -> None:
        # In mid-epoch Lightning has loaded the feed's state by itself (a feed has state_dict and
        # load_state_dict); from a checkpoint between two epochs it has not.
        if self.feed.epoch != self.current_epoch:
            self.feed.set_epoch(self.current_epoch)
        if self.rng is not None:
            torch.set_rng_state(self.rng)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = torch.get_rng_state()  # dropout draws from it, and Lightning leaves it out

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rng = checkpoint["rng"]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if self.trainer.training:
            return batch  # the feed has put it there, and as it is it keeps its keys
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, i: int) -> Tensor:
        note(self.out / "seen.jsonl", self.global_step, self.current_epoch, batch.keys_of_rows, self.kill_at)
        return nn.functional.cross_entropy(self.net(batch["x"]), batch["labels"])

    def validation_step(self, batch: Any, i: int) -> None:
        self.log("accuracy", (self.net(batch["x"]).argmax(1) == batch["labels"]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Save(pl.Callback):
    """A checkpoint every 4 batches and at the end of an epoch, written aside and renamed by Lightning.

    Not ModelCheckpoint(every_n_train_steps=4): it also saves in the last batch of an epoch, and a run that
    was resumed from there counts its epochs wrong when it is stopped once more (Lightning 2.6).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
        if (i + 1) % 4 == 0 and not trainer.is_last_batch:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def main(out: Path, kill_at: int) -> None:
    store = make_store(out / "store")
    feed = fl.Feed(store, batch_size=8, order=fl.Shuffle(seed=1))
    # A DataLoader draws a seed at each pass. From a generator of its own, not from the one that dropout
    # uses: training does not depend on how often it is evaluated.
    validation = DataLoader(store.dataset(), batch_size=32, generator=torch.Generator())
    pl.seed_everything(0, verbose=False)
    head, last = Head(feed, out, kill_at), out / "last.ckpt"
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", devices=1, default_root_dir=out, logger=False,
        callbacks=[Save(last)], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    # weights_only: nothing is unpickled
    trainer.fit(head, feed, validation, ckpt_path=last if last.exists() else None, weights_only=True)
    save_file(head.state_dict(), out / "final.safetensors")
    print(f"trained {trainer.global_step} steps")


if __name__ == "__main__":
    given = arguments(__doc__)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    main(given.out, given.kill_at)

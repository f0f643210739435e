"""The example of the README, as it is shown there."""

import lightning.pytorch as pl
import torch

import zerokern as zk
import zerokern.integrations.lightning  # registers "zerokern", "zerokern_stage_1", _2, _3


class Task(pl.LightningModule):
    def configure_model(self):  # on the device; zk.build(...) for a model larger than one rank's memory
        self.net = zk.shard(torch.nn.Linear(8, 8), stage=3)

    def training_step(self, batch, number):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return zk.AdamW(self.parameters(), lr=1e-2, tier="cpu")  # the model, or its optimizer, or neither


if __name__ == "__main__":
    trainer = pl.Trainer(strategy="zerokern", devices=2, accelerator="cpu", max_epochs=1, gradient_clip_val=1.0)
    trainer.fit(Task(), torch.utils.data.DataLoader(torch.ones(16, 8), batch_size=4))
    trainer.save_checkpoint("ckpt")  # a folder of zk.save; trainer.fit(Task(), loader, ckpt_path="ckpt") goes on

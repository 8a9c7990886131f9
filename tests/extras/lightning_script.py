"""A script that knows nothing of shardwise, or one word of it: a regression by Lightning, told where to write.

`lightning_script.py FILE PACKAGE [STRATEGY]`; `PACKAGE` is one of Lightning's two names.
"""

import importlib
import json
import sys

import torch

pl = importlib.import_module(sys.argv[2])
strategy = sys.argv[3] if len(sys.argv) > 3 else "auto"
if strategy.startswith("shardwise"):
    import shardwise.integrations.lightning  # noqa: F401


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


module = Regression()
rows = torch.arange(96.0).sin().reshape(24, 4)
devices = {} if strategy == "auto" else {"devices": 2}
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=2, **devices, **quiet)
trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
weights = {name: value.tolist() for name, value in module.state_dict().items()}
if trainer.is_global_zero:
    with open(sys.argv[1], "w") as file:
        kind = type(trainer.strategy).__name__
        json.dump({"losses": module.losses, "weights": weights, "strategy": kind, "world": trainer.world_size}, file)

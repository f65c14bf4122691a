"""The training loop, and what keeps it alive."""

from frostline.trainer.job import TrainResult as TrainResult
from frostline.trainer.restore import restored as restored
from frostline.trainer.run import evaluate as evaluate
from frostline.trainer.run import train as train

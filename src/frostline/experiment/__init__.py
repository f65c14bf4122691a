"""Experiments: workloads with nothing to train, run in units that are computed once and kept."""

from frostline.experiment.context import Context as Context
from frostline.experiment.run import Result as Result
from frostline.experiment.run import run as run

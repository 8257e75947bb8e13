"""Training: a loop, checkpoints, and several processes."""

from pyro_vsd.training import distributed
from pyro_vsd.training.checkpoint import load_checkpoint, save_checkpoint
from pyro_vsd.training.compiling import compile_step
from pyro_vsd.training.fitting import Checkpoint, EarlyStopping, fit
from pyro_vsd.training.history import History

__all__ = [
    "Checkpoint",
    "EarlyStopping",
    "History",
    "compile_step",
    "distributed",
    "fit",
    "load_checkpoint",
    "save_checkpoint",
]

"""Training for those who want it done: checkpoints, a loop, and many processes."""

from pyro_vsd.training import distributed
from pyro_vsd.training.checkpoint import load_checkpoint, save_checkpoint
from pyro_vsd.training.fitting import fit
from pyro_vsd.training.history import History
from pyro_vsd.training.loop import Checkpoint
from pyro_vsd.training.stopping import EarlyStopping

__all__ = ["Checkpoint", "EarlyStopping", "History", "distributed", "fit", "load_checkpoint", "save_checkpoint"]

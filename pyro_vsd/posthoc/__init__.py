"""After training: factors fitted on held-out rows, and noise for a network that was trained without."""

from pyro_vsd.posthoc.calibrating import calibrate
from pyro_vsd.posthoc.trained_network import from_trained

__all__ = ["calibrate", "from_trained"]

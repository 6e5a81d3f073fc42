"""Episode sources: one file each, the same interface for all
(`metanudge.tasks.episodes.Episodes`).
"""

from metanudge.tasks.episodes import Episodes
from metanudge.tasks.labelled import Labelled
from metanudge.tasks.mnist1d import MNIST1D
from metanudge.tasks.omniglot import Omniglot
from metanudge.tasks.quadratic import Quadratic
from metanudge.tasks.sinusoid import Sinusoid

__all__ = ["MNIST1D", "Episodes", "Labelled", "Omniglot", "Quadratic", "Sinusoid"]

"""Episode sources: one file each, the same interface for all
(`metanudge.tasks.episodes.Episodes`).
"""

from metanudge.tasks.augment import Changes
from metanudge.tasks.episodes import Episodes
from metanudge.tasks.given import Given
from metanudge.tasks.labelled import Labelled
from metanudge.tasks.mnist1d import MNIST1D
from metanudge.tasks.omniglot import Omniglot
from metanudge.tasks.quadratic import Quadratic
from metanudge.tasks.sinusoid import Sinusoid
from metanudge.tasks.support import with_support
from metanudge.tasks.text import EncodedText, Text

SOURCES: dict[str, type[Episodes]] = {
    "mnist1d": MNIST1D,
    "omniglot": Omniglot,
    "sinusoid": Sinusoid,
}
"""What the command line knows by name (in lower case, without hyphens); one of your own is added
with `SOURCES["name"] = Class`.
"""

__all__ = [
    "MNIST1D",
    "SOURCES",
    "Changes",
    "EncodedText",
    "Episodes",
    "Given",
    "Labelled",
    "Omniglot",
    "Quadratic",
    "Sinusoid",
    "Text",
    "with_support",
]

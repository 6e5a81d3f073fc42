"""Where solves run: many rows at once under `torch.func`, or one at a time on the user's own
module.
"""

from metanudge.engines.diagnosis import StackingError
from metanudge.engines.inner import Cost, Inner, Measured
from metanudge.engines.inplace import InplaceEngine
from metanudge.engines.stacked import StackedEngine

Engine = StackedEngine | InplaceEngine

__all__ = ["Cost", "Engine", "Inner", "InplaceEngine", "Measured", "StackedEngine", "StackingError"]

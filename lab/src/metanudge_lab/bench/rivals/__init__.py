"""Everything else that computes these meta-gradients, each in its best idiomatic code; one package
a file.

All rivals run the usual inner loop of MAML, plain SGD without a proximal term. That is a little
less work than ours, and favours them. The exception is betty's iMAML, which is not defined without
the term.
"""

from __future__ import annotations

from metanudge_lab.bench.contender import Contender
from metanudge_lab.bench.rivals import (
    betty,
    compiled,
    cuda_graph,
    higher,
    learn2learn,
    loop,
    torchopt,
    vmap,
)

RIVALS: tuple[Contender, ...] = (
    *loop.CONTENDERS,
    *vmap.CONTENDERS,
    *cuda_graph.CONTENDERS,
    *compiled.CONTENDERS,
    *higher.CONTENDERS,
    *torchopt.CONTENDERS,
    *betty.CONTENDERS,
    *learn2learn.CONTENDERS,
)

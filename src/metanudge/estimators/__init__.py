"""How to differentiate: one method a file, all through the interface of
`metanudge.estimators.base`.
"""

from metanudge.estimators.base import Estimator
from metanudge.estimators.esmaml import ESMAML
from metanudge.estimators.exact import Exact
from metanudge.estimators.fobmaml import FOBMAML
from metanudge.estimators.fomaml import FOMAML
from metanudge.estimators.imaml import IMAML
from metanudge.estimators.maml import MAML
from metanudge.estimators.reptile import Reptile
from metanudge.estimators.run import DivergenceWarning, ZeroGradientWarning, meta_gradient
from metanudge.estimators.total import NonFiniteError, Stats

ESTIMATORS: list[type[Estimator]] = [FOBMAML, MAML, FOMAML, Reptile, IMAML, ESMAML, Exact]
"""What the command line, error messages and the tests know; one of your own is added with
`ESTIMATORS.append`.
"""

__all__ = [
    "ESMAML",
    "ESTIMATORS",
    "FOBMAML",
    "FOMAML",
    "IMAML",
    "MAML",
    "DivergenceWarning",
    "Estimator",
    "Exact",
    "NonFiniteError",
    "Reptile",
    "Stats",
    "ZeroGradientWarning",
    "meta_gradient",
]

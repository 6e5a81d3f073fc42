"""The spec language of the command line: `NAME`, or `NAME:key=value,key=value`.

    fobmaml:nu=0.1,stencil=forward   gradient_descent:lr=0.1,steps=5   adam:lr=0.01,betas=(0.9,0.99)
    torch_optimizer:optimizer=adam,steps=5,lr=0.01    conv4:channels=32    my_package:Net:width=64

Names match whatever their case, `-` and `_` (`FO-MAML`, `fomaml`). Values are converted to the
types that the target declares, and the target itself judges them. `str` of a parsed spec writes it
in one fixed way, so that two specs mean the same when they are equal.
"""

from metanudge.training.specs.build import (
    ESTIMATORS_BY_NAME,
    OPTIMIZERS,
    SOLVERS,
    OptimizerFactory,
    build_estimator,
    build_optimizer,
    build_solver,
    parameter_groups,
    parse_estimator,
    parse_optimizer,
    parse_solver,
)
from metanudge.training.specs.language import Spec, known, normal, show, split, split_options
from metanudge.training.specs.model import Shapes, build_model, parse_model
from metanudge.training.specs.targets import convert, make

__all__ = [
    "ESTIMATORS_BY_NAME",
    "OPTIMIZERS",
    "SOLVERS",
    "OptimizerFactory",
    "Shapes",
    "Spec",
    "build_estimator",
    "build_model",
    "build_optimizer",
    "build_solver",
    "convert",
    "known",
    "make",
    "normal",
    "parameter_groups",
    "parse_estimator",
    "parse_model",
    "parse_optimizer",
    "parse_solver",
    "show",
    "split",
    "split_options",
]

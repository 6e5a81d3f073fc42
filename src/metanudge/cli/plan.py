"""`metanudge plan DATA`: what the meta-steps of a run would need, without running it."""

from __future__ import annotations

from metanudge.cli.train import parse
from metanudge.training.errors import UserError

_DESCRIPTION = """Show the memory and the time of a meta-step, for several estimators and both engines: metanudge plan DATA [OPTIONS]

It takes the options of metanudge train, and writes nothing.

Examples:

  metanudge plan omniglot --ways 20 --tasks 16
  metanudge plan mnist1d --estimator maml --engine inplace --device cpu

Exit codes: {codes}"""  # noqa: E501 (one line of the help)


def run(argv: list[str]) -> int:
    """Run the command."""
    config = parse(argv, prog="metanudge plan", description=_DESCRIPTION).train
    config.check()
    if not config.data:
        raise UserError("What for? Name the data, as for metanudge train: metanudge plan mnist1d.")
    from metanudge.training.room import plan_of_run  # loads torch, which --help must not wait for

    print(plan_of_run(config))
    return 0

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
    if config.shard > 1:
        raise UserError(
            f"--shard {config.shard}: metanudge plan looks at one process that has all of a model."
            " Leave it out; memory for parameters is divided by the shards, that for activations"
            " is not."
        )
    # these load torch, which --help must not wait for
    from metanudge.planning import plan
    from metanudge.training import sources
    from metanudge.training.device import computing_in, device_called

    device = device_called(config.device)
    config = sources.for_device(config, device)
    source = sources.build_source(config, device=device)
    config = sources.resolve(config, source)
    learner = sources.build_learner(config, source)
    with computing_in(config.precision, source.device):
        print(plan(learner, source.batch(range(config.tasks))))
    return 0

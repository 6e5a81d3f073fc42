"""Which commands there are: our own, and those that other distributions add.

To add some, a distribution names a dict like `OWN` as an entry point of the group
`metanudge.commands`. The dict's module is imported for `--help`, so it loads nothing heavy.
"""

from __future__ import annotations

from typing import NamedTuple

GROUP = "metanudge.commands"


class Command(NamedTuple):
    """One line for `--help`, and the module whose `run(argv: list[str]) -> int` is the command;
    imported when it is called.
    """

    help: str
    module: str


OWN = {
    "train": Command("meta-train a few-shot learner, or resume a run", "metanudge.cli.train"),
    "eval": Command("accuracy of a trained run on held-out tasks", "metanudge.cli.eval"),
    "page": Command("a run as one page to look at", "metanudge.cli.page"),
    "adapt": Command("adapt a trained run to your own examples and predict", "metanudge.cli.adapt"),
    "plan": Command("memory and time of a run's meta-steps, before it runs", "metanudge.cli.plan"),
    "data": Command("list, fetch and verify the data sets", "metanudge.cli.data"),
    "doctor": Command("check the installation with a short self-test", "metanudge.cli.doctor"),
}
_OF_THE_LAB = ("reproduce", "report", "bench")  # for the hint alone


def whence(name: str) -> str:
    """What to install for a command that is not here, for an error message; nothing where we do not
    know.
    """
    return (
        " It is one of metanudge-lab's: pip install metanudge-lab." if name in _OF_THE_LAB else ""
    )

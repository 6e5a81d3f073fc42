"""What `metanudge --help` learns of us; see `metanudge.cli.commands`."""

from metanudge.cli.commands import Command

COMMANDS = {
    "reproduce": Command(
        "measure the paper's figures and tables anew", "metanudge_lab.cli.reproduce"
    ),
    "report": Command(
        "one page of all results, with figures and verdicts", "metanudge_lab.cli.report"
    ),
    "bench": Command(
        "speed and memory, side by side with other libraries", "metanudge_lab.cli.bench"
    ),
}

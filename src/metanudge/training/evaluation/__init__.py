"""How well a learner does on tasks it has never seen: accuracy with its confidence interval, by
class and by number of steps.

Models with BatchNorm are judged twice, because the two numbers differ and papers rarely say which
one they give:

- *transductive*: query examples are normalised with the statistics of the whole query set (the
  usual MAML protocol); a prediction then depends on the other queries.
- *inductive*: query examples are normalised with the statistics of the support set under the
  adapted weights; a prediction depends on the support set and the one example only, as it does when
  the learner is used.

Cost per task: one solve per entry of `steps`, and per entry one forward pass of the query set
(three passes with BatchNorm).
"""

from metanudge.training.evaluation.measure import Progress, evaluate_run, evaluate_tasks
from metanudge.training.evaluation.mistakes import eval_file, write_report
from metanudge.training.evaluation.predict import with_support_statistics
from metanudge.training.evaluation.report import EvaluationReport, plot_steps, steps_figure

__all__ = [
    "EvaluationReport",
    "Progress",
    "eval_file",
    "evaluate_run",
    "evaluate_tasks",
    "plot_steps",
    "steps_figure",
    "with_support_statistics",
    "write_report",
]

"""Speed and memory against everything else that computes the same thing, and against what the
machine could do at best.

`metanudge bench` on the command line; `python -m metanudge_lab.bench` where only torch and numpy
are installed. To add a rival, write one file in `rivals/` and a line in its `__init__`.
"""

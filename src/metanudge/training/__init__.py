"""Training runs: what turns a meta-gradient into hours of work that can be watched, stopped and
resumed.
"""

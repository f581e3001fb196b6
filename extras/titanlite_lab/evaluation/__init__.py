"""Downstream evaluation of checkpoints through lm-eval; its tasks are in `task_set/`.

lm-eval is imported where it is used: only programs that evaluate need it.
"""

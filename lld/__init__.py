"""Trains search agents with GRPO + LLDS; README.md has the reading order.

A tensor's name ends in its shape: B rows (episodes), T tokens of a row, P questions, G episodes of each,
R rows of an update or pass, N tokens in a list, S slots, V vocabulary, C hidden size, 1 a kept dimension.
A step is a rollout and its updates; an update is an optimizer step.
"""

"""Trains search agents with GRPO + LLDS.

Read in this order: protocol, episode, engine, rollout, reward, advantages, policy, loss, update.
"""

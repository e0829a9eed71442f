"""Tests of atoll.planner."""

"""Predicting the agent's next call during its turn and running read-only tools early."""

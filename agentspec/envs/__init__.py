"""Worlds with their tools and rewards, and the plain episode loop."""

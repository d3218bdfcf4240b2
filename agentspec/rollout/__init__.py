"""Sampling many sequences on one device: handles that extend, fork, rewind and sample."""

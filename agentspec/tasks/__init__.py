"""Streams of tasks: generators and loaders, one module per data set, resumable by index."""

"""One language model that acts with tools and predicts its own next call, see README.md."""

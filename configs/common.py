"""What the config files share: the default config, to be changed in place."""

from ml_collections import ConfigDict

from agentspec.configuration import default_config


def base() -> ConfigDict:
    """Every key at its default (``agentspec.settings``)."""
    return default_config()

"""From a name or a path to a model in memory."""

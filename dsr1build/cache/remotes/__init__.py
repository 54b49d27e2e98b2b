"""Adapters of ``dsr1build.cache.remote.Remote``, one for each protocol. Each is imported when a profile names its kind."""

"""Joining a Ray cluster, for the commands that have `--ray`."""

from __future__ import annotations

import logging
import os
from typing import Any

from myna.core.errors import ConfigError


def connect_cluster(address: str, **options: Any) -> Any:
    """The `ray` module, as a member of the cluster at an address: HEAD:PORT, `auto` for the one that this machine
    belongs to, or `local` for one that is started here and ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"ray cannot be imported: {error}", hint='pip install "myna[cluster]"') from error
    if not ray.is_initialized():
        if address == "local":
            options["include_dashboard"] = False
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"there is no Ray cluster at {address}: {error}",
                hint="start one: ray start --head, and on the others ray start --address=HEAD:6379; if it asks for a "
                "token: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE, as on its head",
            ) from None
    return ray

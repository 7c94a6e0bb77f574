"""The import name of `dali_pipes.integrations.lightning`, which documents and users' programs have."""

from dali_pipes.integrations.lightning import DataModule

__all__ = ["DataModule"]

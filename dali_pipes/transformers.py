"""The import name of `dali_pipes.integrations.transformers`, which documents and users' programs have."""

from dali_pipes.integrations.transformers import Trainer

__all__ = ["Trainer"]

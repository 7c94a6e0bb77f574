"""``auto`` to ``cpu`` or ``cuda``: where a training step would want its batches."""

__all__ = ["delivery_device"]


def delivery_device(device: str) -> str:
    """The name that torch has for ``auto``, ``cpu`` or ``gpu``.

    Raises:
        ValueError: If ``gpu`` is asked for and torch sees none.
    """
    import torch

    if device == "gpu" and not torch.cuda.is_available():
        raise ValueError("device='gpu', and torch sees no CUDA device; use 'auto' or 'cpu'")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"

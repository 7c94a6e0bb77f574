"""Numbers of other distributions, each made of a sample's own uniform numbers.

numpy guarantees that its raw integers stay the same, but not its distributions; so they are written out here.
"""

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]

GAMMA_TRIES = 8
"""Each try is taken with a probability over 0.95; if none is, once in about 4e10, the draw is the mode's neighbour."""
GAMMA_UNIFORMS = 3 * GAMMA_TRIES + 1


def normals(uniforms: Float64s) -> Float64s:
    """Make standard normal numbers of pairs of uniform ones: float64 [N, 2] in [0, 1) -> float64 [N].

    G. E. P. Box, M. E. Muller, "A Note on the Generation of Random Normal Deviates", 1958. The uniform numbers are
    multiples of 2**-32, so no result is beyond 6.7.

    >>> normals(np.array([[0.5, 0.0], [0.5, 0.5], [0.0, 0.3]])).round(3).tolist()
    [1.177, -1.177, 0.0]
    """
    radius = np.sqrt(-2 * np.log1p(-uniforms[:, 0]))
    # Adding 0 makes 0 of -0.
    return np.asarray(radius * np.cos(2 * np.pi * uniforms[:, 1]) + 0.0, np.float64)


def betas(uniforms: Float64s, *, alpha: float, beta: float) -> Float64s:
    """Make numbers of Beta(alpha, beta) of uniform ones: float64 [N, 2 * GAMMA_UNIFORMS] -> float64 [N] in [0, 1].

    The result is X / (X + Y) of two Gamma numbers.
    """
    first = log_gammas(uniforms[:, :GAMMA_UNIFORMS], alpha)
    second = log_gammas(uniforms[:, GAMMA_UNIFORMS:], beta)
    with np.errstate(over="ignore"):  # exp may become infinite, and the result 0
        return np.asarray(1 / (1 + np.exp(second - first)), np.float64)


def log_gammas(uniforms: Float64s, shape: float) -> Float64s:
    """Make logarithms of Gamma(shape, 1) numbers of uniform ones: float64 [N, GAMMA_UNIFORMS] -> float64 [N].

    They are logarithms because with a small shape most Gamma numbers are below the smallest float.

    G. Marsaglia, W. W. Tsang, "A Simple Method for Generating Gamma Variables", 2000: of a normal number x and
    ``v = (1 + x / sqrt(9 d))**3`` with ``d = shape - 1/3``, ``d v`` is taken with a probability that depends on x. A
    shape below 1 is drawn with ``shape + 1``, times ``U**(1 / shape)``.
    """
    tries = uniforms[:, :-1].reshape(-1, GAMMA_TRIES, 3)  # [N, try, (two for x, one for the choice)]
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    x = normals(tries[..., :2].reshape(-1, 2)).reshape(-1, GAMMA_TRIES)
    v = (1 + x / np.sqrt(9 * d)) ** 3
    log_v = np.log(np.where(v > 0, v, 1))
    is_taken = (v > 0) & (np.log1p(-tries[..., 2]) < x**2 / 2 + d - d * v + d * log_v)
    first = np.argmax(is_taken, axis=1)[:, None]
    logs = np.log(d) + np.take_along_axis(log_v, first, axis=1)[:, 0]
    if shape < 1:
        logs = logs + np.log1p(-uniforms[:, -1]) / shape
    return np.asarray(logs, np.float64)

"""Refuse graphs that mix sizes of stored photos with upright pixels, where the data set has photos that are turned."""

from collections.abc import Iterable, Mapping, Set

from dali_pipes.errors import DataError


def check_orientations(
    decoded: Mapping[str, Set[bool]], sized: Iterable[tuple[str, bool]], *, turned: Mapping[str, int] | None
) -> None:
    """Compare the sizes that a graph asks for with what its decoders give.

    Args:
        decoded: Component -> whether its decoders turn photos upright, as `decoded_inputs` finds it.
        sized: Components whose size the graph asked for, each with whether the size is that of the upright photo.
        turned: `Manifest.turned`. A data set without photos that are turned takes any graph, and so does one that does
            not know of them.

    Raises:
        DataError: If the photos of a component are turned, and the graph decodes them in another way than it sizes
            them: names the component, and the arguments that must be equal.
    """
    for component, orient in sorted(sized):
        num_turned = sum((turned or {}).get(name, 0) for name in component.split(";"))
        if num_turned and component in decoded and orient not in decoded[component]:
            raise DataError(
                f"the graph asks for sizes or crops of {_seen(orient)} photos '{component}', and decodes them as "
                f"{_seen(not orient)} ones: adjust_orientation={not orient}; {num_turned} photos of the data set have "
                "an EXIF orientation that turns them. In the graph, give one value to all: orient = "
                f"components.orient(), components.size('{component}', orient=orient), random.resized_crop(..., "
                "orient=orient) and fn.decoders...(..., adjust_orientation=orient)"
            )


def _seen(orient: bool) -> str:
    return "upright" if orient else "stored"

"""Split a member's name: path in, key and component out. The one place where that is done."""

__all__ = ["split_key"]


def split_key(name: str) -> tuple[str, str] | None:
    """Key and component of an archive member, as WebDataset splits them.

    The key is the path up to the first dot after the last slash, directory kept; the component is the rest, in the
    case it was written (the index lower-cases it, as WebDataset does).

    Returns:
        ``(key, component)``, or ``None`` for a name that belongs to no sample: a base name without a dot, one that
        starts with a dot, or one that ends at its dot. (WebDataset 1.0 gives ``dir/.hidden.x`` the key ``dir/``; such
        a member, typically macOS's ``._photo.jpg``, is no sample anywhere else, nor here.)

    >>> split_key("a/001.seg.png")
    ('a/001', 'seg.png')
    >>> split_key("v1.0/001.jpg")
    ('v1.0/001', 'jpg')
    >>> split_key("a/README") is None
    True
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, component = base.partition(".")
    if not stem or not dot or not component:
        return None
    return f"{folder}{slash}{stem}", component

"""Split the name of an archive member into key and component. All code splits names by this function."""


def split_key(name: str) -> tuple[str, str] | None:
    """Key and component of an archive member, split as in WebDataset.

    The key is the path up to the first dot after the last slash, with its directory. The component is the rest, in its
    original case (the index lower-cases it, as WebDataset does).

    Returns:
        ``(key, component)``, or ``None`` for a name that belongs to no sample: a base name that has no dot, starts with
        a dot, or ends at its first dot. (WebDataset 1.0 gives ``dir/.hidden.x`` the key ``dir/``. Such a member,
        typically macOS's ``._photo.jpg``, is not a sample here or in other readers.)

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

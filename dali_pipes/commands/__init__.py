"""The commands of `dali-pipes` that are not `prep`'s or `bench`'s."""

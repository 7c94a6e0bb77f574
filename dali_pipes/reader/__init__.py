"""The reader half: the plan's steps in, batches of encoded bytes out."""

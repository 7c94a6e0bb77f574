"""The decode pipeline: what a user's graph asks for, how a batch answers, and the DALI pipeline that runs it."""
